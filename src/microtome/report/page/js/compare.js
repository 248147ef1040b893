// Two runs: the calls that changed the most.
const LISTED = 40;

function compareView(view) {
  const { values, only_here: onlyHere, only_there: onlyThere } = DATA.compare;
  const shared = KNOWN.filter((metric) => values[metric.name]);
  let name = ["device_s", "time_s", "macs", "params"].find((one) => values[one]) ?? shared[0].name;
  const body = el("tbody");
  view.append(
    el("div", { class: "controls" }, chooser("Calls by change in", shared.map((metric) => [metric.name, metric.label]), name, (chosen) => { name = chosen; draw(); })),
    el("div", { class: "scroll short" }, el("table", {}, el("thead", {}, el("tr", {},
      ...["call", "this run", "the other", "difference", "change"].map((text, at) => el("th", { scope: "col", class: at ? "n" : "" }, text)))), body)),
    el("p", { class: "dim" }, `${onlyHere} calls are in this run alone, ${onlyThere} in the other alone. Listed are calls without calls inside.`));

  function draw() {
    const { unit } = METRICS[name];
    const rows = [];
    for (let at = 0; at < COUNT; at++) {
      const [here, there] = [valueOf(name, at), values[name][at]];
      if (!CHILDREN[at].length && here !== null && there !== null && here !== there) rows.push([at, here, there]);
    }
    rows.sort((a, b) => Math.abs(b[2] - b[1]) - Math.abs(a[2] - a[1]) || a[0] - b[0]);
    const cells = ([at, here, there]) => el("tr", {}, el("th", { scope: "row" }, link(CALLS.address[at])),
      ...[write(unit, here), write(unit, there), (there > here ? "+" : "−") + write(unit, Math.abs(there - here)), here ? `${there > here ? "+" : "−"}${Math.abs((100 * (there - here)) / here).toFixed(1)} %` : UNKNOWN].map((text) => el("td", { class: "n" }, text)));
    body.replaceChildren(...(rows.length ? rows.slice(0, LISTED).map(cells) : [el("tr", {}, el("td", { colSpan: 5 }, "No call differs."))]));
  }
  draw();
}
