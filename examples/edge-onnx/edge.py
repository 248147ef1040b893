"""Run the head of a model in ONNX Runtime, and its tail on a server of microtome. Needs neither torch nor microtome.

    python edge.py HEAD.onnx HOST:PORT x=image.npy [--codec int8] [--to output.npz]

README.md says where HEAD.onnx and the modules `split_pb2` and `split_pb2_grpc` come from.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import onnxruntime
import split_pb2 as pb
from split_pb2_grpc import SplitStub

#: Of split.proto.
PROTOCOL = 1
#: Seconds that the server has for a request.
TIMEOUT_S = 30.0
Arrays = dict[str, np.ndarray]


class Head:
    """The first stage of a model, as `stage.export` wrote it.

    Attributes:
        metadata: What the file says about the stage: the fingerprint of the model, the cut, and the names of tensors.
    """

    def __init__(self, file: str) -> None:
        self._session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.metadata = json.loads(self._session.get_modelmeta().custom_metadata_map["microtome"])

    def __call__(self, inputs: Arrays) -> Arrays:
        named = dict(zip(self.metadata["inputs"], self._session.get_inputs(), strict=True))
        if missing := named.keys() - inputs.keys():
            got = ", ".join(inputs) or "none"
            raise SystemExit(
                f"expected the inputs {', '.join(named)}, got {got}: pass {', '.join(missing)} as NAME=FILE"
            )
        feeds = {one.name: inputs[name] for name, one in named.items()}
        return dict(zip(self.metadata["outputs"], self._session.run(None, feeds), strict=True))


class Tail:
    """The rest of the model, on a server."""

    def __init__(self, address: str, metadata: dict[str, Any]) -> None:
        # An output may be longer than the 4 MiB that gRPC accepts by default.
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._stub = SplitStub(self._channel)
        self._metadata = metadata
        self._hello = self._stub.Hello(pb.HelloRequest(protocol=PROTOCOL), timeout=TIMEOUT_S)
        for name, expected, got in (
            ("protocol", PROTOCOL, self._hello.protocol),
            ("fingerprint", metadata["fingerprint"], self._hello.fingerprint),
        ):
            if got != expected:
                raise SystemExit(f"{address}: expected the {name} {expected}, got {got}")
        if metadata["ends_at"] not in self._hello.cuts:
            raise SystemExit(f"{address} does not serve the cut at {metadata['ends_at']!r}")

    def __call__(self, tensors: Arrays, inputs: Arrays, codec: str = "raw") -> Arrays:
        """Return the output of the model.

        Args:
            tensors: What the head returned.
            inputs: What it took: the server needs the shapes.
            codec: `"raw"`, `"fp16"` or `"int8"`.
        """
        request = pb.Tensors(
            at=self._metadata["ends_at"],
            fingerprint=self._metadata["fingerprint"],
            inputs=[pb.InputShape(name=name, shape=inputs[name].shape) for name in self._metadata["arguments"]],
            tensors=[encode(name, array, codec) for name, array in tensors.items()],
        )
        data = request.SerializeToString()
        print(f"{len(data):,} bytes cross at {request.at}")
        reply = next(self._stub.Stream(self._messages(data, codec), timeout=TIMEOUT_S))
        if reply.HasField("error"):
            raise SystemExit(f"{pb.Error.Kind.Name(reply.error.kind)}: {reply.error.message}")
        return {tensor.name: decode(tensor) for tensor in pb.Tensors.FromString(reply.output).tensors}

    def _messages(self, data: bytes, codec: str) -> Iterator[pb.Request]:
        """One request, in parts that the server accepts."""
        part = self._hello.max_part or self._hello.max_message
        first = pb.Request(id="1", timeout_s=TIMEOUT_S, codec=codec, size=len(data), format=pb.TENSORS)
        first.boundary = data[:part]
        yield first
        for start in range(part, len(data), part):
            yield pb.Request(id="1", boundary=data[start : start + part])

    def close(self) -> None:
        self._channel.close()


def encode(name: str, array: np.ndarray, codec: str) -> pb.Tensor:
    """A tensor with its values; floats as a codec stores them."""
    tensor = pb.Tensor(name=name, dtype=array.dtype.name, shape=array.shape)
    parts = [array]
    if array.dtype in (np.float32, np.float64) and codec == "fp16":
        parts, tensor.coded = [array.astype(np.float16)], "float16"
    elif array.dtype in (np.float32, np.float64) and codec == "int8" and array.ndim > 1 and array.size:
        tensor.channel = 1 if array.ndim >= 4 else array.ndim - 1
        parts, tensor.coded = quantize(array, tensor.channel), "int8"
    tensor.parts.extend(pb.Part(data=part.tobytes()) for part in parts)
    return tensor


def quantize(array: np.ndarray, channel: int) -> list[np.ndarray]:
    """Integers from -127 to 127, and the scale of each channel."""
    others = tuple(dim for dim in range(array.ndim) if dim != channel)
    scales = np.maximum(np.abs(array).max(others, keepdims=True) / 127, np.finfo(array.dtype).tiny)
    return [np.rint(array / scales).astype(np.int8), scales]


def decode(tensor: pb.Tensor) -> np.ndarray:
    """The tensor of a reply, of the codecs above."""
    values = np.frombuffer(tensor.parts[0].data, tensor.coded or tensor.dtype).reshape(tensor.shape)
    array = values.astype(tensor.dtype)
    if tensor.coded == "int8":
        scales = np.frombuffer(tensor.parts[1].data, tensor.dtype)
        array *= (
            scales.reshape([-1 if dim == tensor.channel else 1 for dim in range(array.ndim)])
            if (tensor.HasField("channel"))
            else scales
        )
    return array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("head", metavar="HEAD.onnx")
    parser.add_argument("server", metavar="HOST:PORT")
    parser.add_argument("inputs", nargs="+", metavar="NAME=FILE.npy")
    parser.add_argument("--codec", choices=["raw", "fp16", "int8"], default="raw")
    parser.add_argument("--to", metavar="FILE.npz", help="Write the output of the model to this file.")
    options = parser.parse_args()
    head = Head(options.head)
    tail = Tail(options.server, head.metadata)
    inputs = {name: np.load(file) for name, file in (word.split("=", 1) for word in options.inputs)}
    start = time.perf_counter()
    outputs = tail(head(inputs), inputs, options.codec)
    print(f"{(time.perf_counter() - start) * 1e3:.1f} ms")
    for name, array in outputs.items():
        print(f"{name}: {array.dtype}{list(array.shape)}, up to {np.abs(array).max():.6g}")
    if options.to is not None:
        np.savez(options.to, **outputs)
    tail.close()


if __name__ == "__main__":
    main()
