// Run the head of a model in ONNX Runtime, and its tail on a server of microtome, from Node.
//
//   node edge.mjs HEAD.onnx HOST:PORT x=image.npy [--codec=int8] [--to=output.npy]
//
// README.md says where HEAD.onnx comes from; split.proto lies beside this file.
import { readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import * as ort from "onnxruntime-web";
import protobuf from "protobufjs";

const PROTOCOL = 1;
const TIMEOUT_S = 30;
const PROTO = fileURLToPath(new URL("split.proto", import.meta.url));
const OPTIONS = { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true };
const service = grpc.loadPackageDefinition(loadSync(PROTO, OPTIONS)).microtome.remote.v1.Split;
const { root } = protobuf.parse(readFileSync(PROTO, "utf8"), { keepCase: true });
const Tensors = root.lookupType("microtome.remote.v1.Tensors");

// The metadata of a stage: an ONNX file is a ModelProto, whose field 14 has properties.
const properties = protobuf.parse(`
  syntax = "proto3";
  message Property { string key = 1; string value = 2; }
  message ModelProto { repeated Property metadata_props = 14; }`, { keepCase: true }).root.lookupType("ModelProto");

const ARRAYS = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array };

// -- the head ---------------------------------------------------------------------------------------------------------

async function loadHead(file) {
  ort.env.wasm.numThreads = 1;
  const bytes = readFileSync(file);
  const { metadata_props } = properties.decode(bytes);
  const metadata = JSON.parse(metadata_props.find(({ key }) => key === "microtome").value);
  const session = await ort.InferenceSession.create(bytes);
  const names = Object.keys(metadata.inputs);
  const run = async (inputs) => {
    const feeds = session.inputNames.map((name, at) => {
      const { dtype, data, shape } = inputs[names[at]];
      return [name, new ort.Tensor(dtype, data, shape)];
    });
    const found = await session.run(Object.fromEntries(feeds));
    return metadata.outputs.map((name, at) => {
      const { type, data, dims } = found[session.outputNames[at]];
      return { name, dtype: type, data, shape: [...dims] };
    });
  };
  return { metadata, run };
}

// -- the tail ---------------------------------------------------------------------------------------------------------

async function openTail(address, metadata) {
  const channel = { "grpc.max_receive_message_length": -1 };
  const stub = new service(address, grpc.credentials.createInsecure(), channel);
  const hello = await greet(stub);
  const found = { protocol: [PROTOCOL, hello.protocol], fingerprint: [metadata.fingerprint, hello.fingerprint] };
  for (const [name, [expected, got]] of Object.entries(found)) {
    if (expected !== got) throw new Error(`${address}: expected the ${name} ${expected}, got ${got}`);
  }
  if (!hello.cuts.includes(metadata.ends_at)) throw new Error(`${address} does not serve the cut at ${metadata.ends_at}`);
  const run = async (tensors, inputs, codec) => {
    const data = Tensors.encode({
      at: metadata.ends_at,
      fingerprint: metadata.fingerprint,
      inputs: metadata.arguments.map((name) => ({ name, shape: inputs[name].shape })),
      tensors: tensors.map((tensor) => encode(tensor, codec)),
    }).finish();
    console.log(`${data.length} bytes cross at ${metadata.ends_at}`);
    const reply = await ask(stub, hello, data, codec);
    if (reply.error) throw new Error(`${reply.error.kind}: ${reply.error.message}`);
    return Tensors.toObject(Tensors.decode(reply.output), { longs: Number, arrays: true }).tensors.map(decode);
  };
  return { run, close: () => stub.close() };
}

function greet(stub) {
  return new Promise((resolve, reject) => {
    stub.Hello({ protocol: PROTOCOL }, { deadline: Date.now() + TIMEOUT_S * 1e3 }, (error, hello) =>
      error ? reject(error) : resolve(hello),
    );
  });
}

// Send one request, in parts that the server accepts.
function ask(stub, hello, data, codec) {
  return new Promise((resolve, reject) => {
    const stream = stub.Stream({ deadline: Date.now() + TIMEOUT_S * 1e3 });
    stream.on("data", resolve).on("error", reject);
    const part = hello.max_part || hello.max_message;
    const first = { id: "1", timeout_s: TIMEOUT_S, codec, size: data.length, format: "TENSORS" };
    for (let start = 0; start < data.length; start += part) {
      stream.write({ ...(start ? { id: "1" } : first), boundary: data.subarray(start, start + part) });
    }
    stream.end();
  });
}

// -- tensors ----------------------------------------------------------------------------------------------------------

const bytesOf = (array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
const arrayOf = (dtype, bytes) => new ARRAYS[dtype](Uint8Array.from(bytes).buffer);
const channelOf = (shape) => (shape.length >= 4 ? 1 : shape.length - 1);

// Calls a function with each index of an array, and that of its channel.
function eachChannel(shape, channel, call) {
  const inner = shape.slice(channel + 1).reduce((product, size) => product * size, 1);
  const total = shape.reduce((product, size) => product * size, 1);
  for (let at = 0; at < total; at++) call(at, Math.floor(at / inner) % shape[channel]);
}

function encode({ name, dtype, data, shape }, codec) {
  const tensor = { name, dtype, shape };
  if (codec !== "int8" || dtype !== "float32" || shape.length < 2 || !data.length) {
    return { ...tensor, parts: [{ data: bytesOf(data) }] };
  }
  const channel = channelOf(shape);
  const scales = new Float32Array(shape[channel]).fill(2 ** -126);
  eachChannel(shape, channel, (at, index) => (scales[index] = Math.max(scales[index], Math.abs(data[at]) / 127)));
  const values = new Int8Array(data.length);
  eachChannel(shape, channel, (at, index) => {
    values[at] = Math.max(-127, Math.min(127, Math.round(data[at] / scales[index])));
  });
  return { ...tensor, coded: "int8", channel, parts: [values, scales].map((part) => ({ data: bytesOf(part) })) };
}

function decode({ name, dtype, shape, parts, coded, channel }) {
  const data = arrayOf(coded || dtype, parts[0].data);
  if (coded !== "int8") return { name, dtype, shape, data };
  const [scales, numbers] = [arrayOf(dtype, parts[1].data), new ARRAYS[dtype](data.length)];
  if (channel === undefined) data.forEach((value, at) => (numbers[at] = value * scales[0]));
  else eachChannel(shape, channel, (at, index) => (numbers[at] = data[at] * scales[index]));
  return { name, dtype, shape, data: numbers };
}

// -- files of numpy ---------------------------------------------------------------------------------------------------

const CODES = { "<f4": "float32", "<f8": "float64", "<i8": "int64", "<i4": "int32", "|b1": "bool" };

function readArray(file) {
  const bytes = readFileSync(file);
  const end = 10 + bytes.readUInt16LE(8);
  const header = bytes.toString("latin1", 10, end);
  const dtype = CODES[/'descr': '([^']+)'/.exec(header)[1]];
  const shape = /'shape': \(([^)]*)\)/.exec(header)[1].split(",").filter((word) => word.trim()).map(Number);
  if (dtype === undefined || header.includes("'fortran_order': True")) throw new Error(`${file}: expected an array in C order of ${Object.values(CODES)}`);
  return { dtype, shape, data: arrayOf(dtype, bytes.subarray(end)) };
}

function writeArray(file, { dtype, data, shape }) {
  const code = Object.keys(CODES).find((key) => CODES[key] === dtype);
  const header = `{'descr': '${code}', 'fortran_order': False, 'shape': (${shape.map((size) => `${size},`).join(" ")}), }`;
  const padded = header.padEnd(Math.ceil((header.length + 11) / 64) * 64 - 11) + "\n";
  const prefix = Buffer.from([0x93, ...Buffer.from("NUMPY"), 1, 0, padded.length & 255, padded.length >> 8]);
  writeFileSync(file, Buffer.concat([prefix, Buffer.from(padded, "latin1"), bytesOf(data)]));
}

// ---------------------------------------------------------------------------------------------------------------------

// An input NAME=FILE, whose path may have further equals signs.
function parseInput(word) {
  const at = word.indexOf("=");
  if (at < 1) throw new Error(`expected NAME=FILE.npy, got ${word}`);
  return [word.slice(0, at), readArray(word.slice(at + 1))];
}

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: { codec: { type: "string", default: "raw" }, to: { type: "string" } },
});
const [file, address, ...words] = positionals;
if (!["raw", "int8"].includes(options.codec)) throw new Error(`expected --codec=raw or int8, got ${options.codec}: edge.py has fp16`);
const head = await loadHead(file);
const tail = await openTail(address, head.metadata);
const inputs = Object.fromEntries(words.map(parseInput));
for (const name of Object.keys(head.metadata.inputs)) {
  if (!(name in inputs)) throw new Error(`expected the inputs ${Object.keys(head.metadata.inputs).join(", ")}, got ${Object.keys(inputs).join(", ") || "none"}`);
}
const start = performance.now();
const outputs = await tail.run(await head.run(inputs), inputs, options.codec);
console.log(`${(performance.now() - start).toFixed(1)} ms`);
for (const { name, dtype, shape } of outputs) console.log(`${name}: ${dtype}[${shape.join(", ")}]`);
// One file for each output: output.npy, or output.0.npy, output.1.npy and so on.
for (const [at, output] of options.to ? outputs.entries() : []) {
  writeArray(outputs.length > 1 ? options.to.replace(/(\.npy)?$/, `.${at}$1`) : options.to, output);
}
tail.close();
