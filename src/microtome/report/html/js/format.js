// Numbers as text, as microtome/units.py writes them.
const UNKNOWN = "–";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 3 }).format;

/** With so many digits after the point; of a tie the even one, as Python has it. */
function fixed(number, digits) {
  const scaled = Math.abs(number) * 10 ** digits;
  const floor = Math.floor(scaled);
  if (scaled - floor !== 0.5) return number.toFixed(digits);
  return ((Math.sign(number) * (floor % 2 ? floor + 1 : floor)) / 10 ** digits).toFixed(digits);
}

/** The digits after the point with which a number below 1000 has three digits. */
const decimals = (number) => (Math.abs(number) < 9.995 ? 2 : Math.abs(number) < 99.95 ? 1 : 0);

function scaledUp(number, step, units) {
  let at = 0;
  while (Math.abs(number) >= step - 0.5 && at < units.length - 1) {
    number /= step;
    at += 1;
  }
  if (at === 0) return grouped(number) + units[0];
  return fixed(number, decimals(number)) + units[at];
}

const threeDigits = (number) => String(Number(number.toPrecision(3)));

function scaledDown(number, unit) {
  if (Math.abs(number) < 0.5e-9) return `0 ${unit}`;
  for (const [letter, size] of [["", 1], ["m", 1e-3], ["u", 1e-6]]) {
    if (Math.abs(number) >= size) return `${fixed(number / size, decimals(number / size))} ${letter}${unit}`;
  }
  return `${(number / 1e-9).toFixed(0)} n${unit}`;
}

const WRITERS = {
  count: (n) => scaledUp(n, 1000, ["", " k", " M", " G", " T", " P", " E"]),
  bytes: (n) => scaledUp(n, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"]),
  seconds: (n) => scaledDown(n, "s"),
  joules: (n) => scaledDown(n, "J"),
  watts: (n) => scaledDown(n, "W"),
  fraction: (n) => `${fixed(100 * n, 0)} %`,
  ratio: (n) => (n < 999.5 ? n.toPrecision(3) : grouped(Math.round(n))),
};

const write = (unit, number) => (number === null || number === undefined ? UNKNOWN : WRITERS[unit](number));

function rate(bitsPerSecond) {
  const at = Math.min(Math.max(Math.floor(Math.log10(bitsPerSecond * 1.0005) / 3), 0), 4);
  return `${threeDigits(bitsPerSecond / 1000 ** at)} ${["", "K", "M", "G", "T"][at]}bps`;
}

const share = (part, whole) => (part === null || !whole ? UNKNOWN : `${((100 * part) / whole).toFixed(1)} %`);
