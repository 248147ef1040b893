// A colour for each kind of module, the same in every view: Okabe and Ito's, which the colour-blind can tell apart.
const KINDS = [[0, 114, 178], [230, 159, 0], [0, 158, 115], [204, 121, 167], [86, 180, 233], [213, 94, 0], [240, 228, 66]];
const OTHER_KIND = [150, 158, 166];

/** The kinds of calls without calls inside that take the largest share of any metric, the largest first. */
const RANKED = (() => {
  const sums = KNOWN.filter((metric) => metric.is_sum && valueOf(metric.name, 0));
  const most = new Map();
  for (const { name } of sums) {
    const shares = new Map();
    for (let at = 0; at < COUNT; at++) {
      if (!CHILDREN[at].length) shares.set(CALLS.type[at], (shares.get(CALLS.type[at]) ?? 0) + (valueOf(name, at) ?? 0) / valueOf(name, 0));
    }
    for (const [type, part] of shares) most.set(type, Math.max(most.get(type) ?? 0, part));
  }
  return [...most].sort((a, b) => b[1] - a[1] || a[0] - b[0]).map(([type]) => type);
})();
const RANK = new Map(RANKED.map((type, rank) => [type, rank]));

const kindColour = (type) => KINDS[RANK.get(type) ?? KINDS.length] ?? OTHER_KIND;
