// Two runs: the calls that changed the most.
const LISTED = 40;

function compareView(view) {
  const { here: before, there: after, noise, shared: inBoth, only_here: onlyHere, only_there: onlyThere } = DATA.compare;
  const shared = KNOWN.filter((metric) => before[metric.name]);
  let name = ["device_s", "time_s", "macs", "params"].find((one) => before[one]) ?? shared[0].name;
  const body = el("tbody");
  const status = el("p", { class: "dim" });
  view.append(
    el("div", { class: "controls" }, chooser("Calls by change in", shared.map((metric) => [metric.name, metric.label]), name, (chosen) => { name = chosen; draw(); })),
    el("div", { class: "scroll short" }, el("table", {}, el("thead", {}, el("tr", {},
      ...["call", "this run", "the other", "difference", "change"].map((text, at) => el("th", { scope: "col", class: at ? "n" : "" }, text)))), body)),
    status);

  const named = ({ count, first }) => grouped(count) + (count ? ` (${first.join(", ")}${count > first.length ? ", …" : ""})` : "");
  const alone = `Calls in this run alone: ${named(onlyHere)}; in the other alone: ${named(onlyThere)}. Listed are calls in both, each without the calls inside it; what is measured is that of the innermost calls measured in both.`;
  /** Whether a call's value is that of its own operators, beside the calls inside it. */
  const isOwnPart = (at) => CHILDREN[at].length && METRICS[name].is_sum && !METRICS[name].is_measured;

  function draw() {
    const { unit, label } = METRICS[name];
    const within = new Set(noise[name] ?? []);
    const known = !inBoth ? [] : before[name].map((here, at) => ({ at, here, there: after[name][at], isNoise: within.has(at) })).filter(({ here, there }) => here !== null && there !== null);
    const rows = known.filter(({ here, there }) => here !== there);
    rows.sort((a, b) => a.isNoise - b.isNoise || Math.abs(b.there - b.here) - Math.abs(a.there - a.here) || a.at - b.at);
    const cells = ({ at, here, there, isNoise }) => {
      const sign = there > here ? "+" : "−";
      const change = here ? `${sign}${Math.abs((100 * (there - here)) / here).toFixed(1)} %` : UNKNOWN;
      return el("tr", {}, el("th", { scope: "row" }, link(CALLS.address[at]), isOwnPart(at) ? " (own)" : ""),
        ...[write(unit, here), write(unit, there), sign + write(unit, Math.abs(there - here))].map((text) => el("td", { class: "n" }, text)),
        el("td", { class: isNoise ? "n dim" : "n", title: isNoise ? change : "" }, isNoise ? "noise" : change));
    };
    const nothing = known.length ? `No call in both runs differs in ${label}.` : inBoth ? `Of no call in both runs ${label} is known.` : "No call is in both runs: there is nothing to compare.";
    body.replaceChildren(...(rows.length ? rows.slice(0, LISTED).map(cells) : [el("tr", {}, el("td", { colSpan: 5 }, nothing))]));
    const noisy = rows.filter(({ isNoise }) => isNoise).length;
    status.textContent = (noisy ? `${grouped(noisy)} of ${grouped(rows.length)} changes ${noisy === 1 ? "is" : "are"} noise: the middle halves of the passes of both runs meet, so nothing says that it changed. ` : "") + alone;
  }
  draw();
}
