// Cuts that are neighbours in the run, grouped by the module they are in, so that each bar is wide enough to read.

/** The first so many parts of an address. */
const prefixOf = (name, depth) => name.split(".").slice(0, depth).join(".");

/** Runs of neighbours with the same key, as `{ from, to, name }`. */
function runsOf(from, to, keyAt) {
  const groups = [];
  for (let at = from; at < to; at++) {
    if (groups.length && groups.at(-1).name === keyAt(at)) groups.at(-1).to = at + 1;
    else groups.push({ from: at, to: at + 1, name: keyAt(at) });
  }
  return groups;
}

/** At most so many groups of the names from one place to another: single ones, modules as deep as fit, or an even few. */
function groupNames(names, from, to, most) {
  if (to - from <= most) return runsOf(from, to, (at) => `${at}`).map((group) => ({ ...group, name: names[group.from] }));
  const deepest = Math.max(...names.slice(from, to).map((name) => name.split(".").length));
  for (let depth = deepest; depth >= 1; depth--) {
    const groups = runsOf(from, to, (at) => prefixOf(names[at], depth));
    if (groups.length <= most && groups.length > 1) return groups;
  }
  const few = Math.ceil((to - from) / most);
  return runsOf(from, to, (at) => `${Math.floor((at - from) / few)}`).map((group) => ({ ...group, name: `${names[group.from]} to ${names[group.to - 1]}` }));
}

/** The fewest last parts of each address in which it differs from all others; more than a bare number. */
function distinctEnds(names) {
  const ends = names.map((name) => name.split(".").map((_, at, parts) => parts.slice(at).join(".")).reverse());
  const counts = new Map();
  for (const end of ends.flat()) counts.set(end, (counts.get(end) ?? 0) + 1);
  return ends.map((ways, at) => ways.find((end) => counts.get(end) === 1 && /\D/.test(end)) ?? names[at]);
}
