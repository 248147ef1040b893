// The calls, from the JSON block.
const DATA = JSON.parse(document.getElementById("data").textContent);
const CALLS = DATA.calls;
CALLS.address = CALLS.address.map((address) => address.replace(/\p{Surrogate}/gu, "\ufffd")); // half a character has no place in a link
const COUNT = CALLS.address.length;
const METRICS = Object.fromEntries(DATA.metrics.map((metric) => [metric.name, metric]));
const KNOWN = DATA.metrics.filter((metric) => metric.missing === null);

const CHILDREN = Array.from({ length: COUNT }, () => []);
const DEPTH = new Int32Array(COUNT);
for (let at = 1; at < COUNT; at++) {
  CHILDREN[CALLS.parent[at]].push(at);
  DEPTH[at] = DEPTH[CALLS.parent[at]] + 1;
}
const BY_ADDRESS = new Map(CALLS.address.map((address, at) => [address, at]));

// The operators between the calls inside a call, where they have a row: they are numbered after the calls.
const OWN = CALLS.own;
const OWN_OF = new Map(OWN.parent.map((at, place) => [at, COUNT + place]));
const isOwn = (at) => at >= COUNT;
const callOf = (at) => (isOwn(at) ? OWN.parent[at - COUNT] : at);
const childrenOf = (at) => CHILDREN[at] ?? [];
const depthOf = (at) => DEPTH[callOf(at)] + isOwn(at);

const typeOf = (at) => (isOwn(at) ? "(own)" : CALLS.types[CALLS.type[at]]);
const valueOf = (name, at) => (isOwn(at) ? OWN.values[name]?.[at - COUNT] : CALLS.values[name]?.[at]) ?? null;
// The value of a full bar: that of the whole model, or the largest of any call if the metric does not add up.
const SCALE = Object.fromEntries(KNOWN.map((metric) => [metric.name, metric.is_sum ? valueOf(metric.name, 0) : CALLS.values[metric.name].reduce((most, value) => Math.max(most, value ?? 0), 0)]));
const formatted = (name, at) => write(METRICS[name].unit, valueOf(name, at));
const fullName = (at) => (isOwn(at) ? `${fullName(callOf(at))} ${nameOf(at)}` : CALLS.address[at] || "(root)");

/** The name of a call below that of the call that contains it. */
function nameOf(at) {
  if (isOwn(at)) return OWN.name[at - COUNT];
  if (at === 0) return "(root)";
  const above = CALLS.address[CALLS.parent[at]].split("#")[0];
  const address = CALLS.address[at];
  return above && address.startsWith(`${above}.`) ? address.slice(above.length + 1) : address;
}

/** The address after the `#` of the page's, and its call: undefined if there is none. */
function linked() {
  let address = location.hash.slice(1);
  try {
    address = decodeURIComponent(address);
  } catch {
    // then it is no address of ours, and shown as it is
  }
  return { address, at: address ? BY_ADDRESS.get(address) ?? BY_ADDRESS.get(address.replace(/#0$/, "")) : undefined };
}

/** The calls around a call, the root first, itself last. */
function pathTo(at) {
  const path = [];
  for (let up = at; up >= 0; up = CALLS.parent[up]) path.unshift(up);
  return path;
}
