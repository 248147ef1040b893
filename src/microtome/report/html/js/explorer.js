// Where to cut: every candidate of the plan, priced again for the link and the speeds that the sliders say.
// The least pixels of a bar, and the most characters of a label.
const BAR_WIDTH = 17;
const LABEL = 22;

function explorerView(view) {
  const parts = DATA.explorer;
  const count = parts.names.length;
  const now = { ...parts.start };
  const edgeOnly = parts.crosses.indexOf(false);
  const cloudOnly = parts.names.map((_, at) => at).filter((at) => parts.baseline[at] && parts.crosses[at]);
  const cuts = parts.names.map((_, at) => at).filter((at) => !parts.baseline[at]);
  const order = [...cloudOnly, ...cuts, edgeOnly];
  const names = order.map((at) => parts.names[at]);
  const everything = { from: 0, to: order.length, name: `all ${grouped(cuts.length)} cuts` };
  let zoomed = [everything];
  let isDue = false;

  const times = (factor) => `× ${threeDigits(factor)}`;
  const sliders = [
    slider("bandwidth_bps", "Bandwidth", 4, 10, rate),
    slider("rtt_s", "Round trip", -4, 0, WRITERS.seconds),
    slider("edge", "Edge speed, × this machine", -2, 2, times),
    slider("cloud", `Cloud speed, × ${parts.cloud}`, -1, 3, times),
  ];
  const verdict = el("p", { class: "verdict", "aria-live": "polite" });
  const crumbs = el("nav", { class: "crumbs", "aria-label": "Cuts shown" });
  const place = el("div", { class: "bars" });
  const payload = el("div", { class: "payload" });
  const tip = el("div", { class: "tip", hidden: true });
  const chartBox = el("div", { class: "chart", tabIndex: 0, role: "group", "aria-label": "Time of each cut; arrows move, Enter opens a module, Escape goes back" }, place, payload, tip);
  const marks = el("div");
  const status = el("div", { class: "status dim", "aria-live": "polite" });
  const bestRows = el("tbody");
  view.append(
    el("div", { class: "sliders" }, ...sliders), verdict, marks, crumbs, chartBox, status,
    el("div", { class: "scroll short" }, el("table", {}, el("thead", {}, el("tr", {},
      ...["the five best", "total", "edge", "link", "cloud", "sends"].map((text, at) => el("th", { scope: "col", class: at ? "n" : "" }, text)))), bestRows)),
    el("p", { class: "dim" }, "Each bar is the time to a result: the edge's part, the link's (encoding, sending, decoding, and the answer on its way back), and the cloud's part; the tallest are cut off. A module with several cuts has one bar, that of the best of them: click it to see them all, or drag across bars. The sliders scale what the model takes; encoding stays as measured."),
    el("ul", { class: "dim" }, ...parts.notes.map((note) => el("li", {}, note))));

  function slider(name, label, low, high, written) {
    const value = el("b");
    const input = el("input", { type: "range", min: low, max: high, step: 0.01, name });
    input.value = Math.log10(now[name]);
    const update = () => {
      value.textContent = written(now[name]);
      input.setAttribute("aria-valuetext", value.textContent);
    };
    input.addEventListener("input", () => {
      now[name] = 10 ** Number(input.value);
      update();
      price();
      if (!isDue) requestAnimationFrame(() => { isDue = false; draw(); });
      isDue = true;
    });
    update();
    return el("label", {}, label, value, input);
  }

  /** The terms of a candidate, added up in the order of its steps. */
  function terms(at) {
    const way = (nbytes) => (parts.crosses[at] ? now.rtt_s / 2 + nbytes / (now.bandwidth_bps / 8) : 0);
    const edge = parts.edge_s[at] / now.edge;
    const cloud = parts.cloud_s[at] / now.cloud;
    const transfer = parts.encode_s[at] + way(parts.sent[at]) + parts.decode_s[at] + way(parts.back[at]);
    return { at, edge, transfer, cloud, total: edge + transfer + cloud };
  }

  let priced = [];
  let best;
  function price() {
    priced = Array.from({ length: count }, (_, at) => terms(at));
    best = priced.reduce((least, one) => (one.total < least.total ? one : least));
    view.dataset.best = parts.names[best.at];
    view.dataset.now = JSON.stringify(now);
    verdict.replaceChildren("Best: ", el("span", { class: "best" }, parts.names[best.at]), `, ${describe(best)}. All on the edge takes ${write("seconds", priced[edgeOnly].total)}, all on the cloud ${write("seconds", Math.min(...cloudOnly.map((at) => priced[at].total)))}.`);
    const ranked = [...priced].sort((a, b) => a.total - b.total || a.at - b.at).slice(0, 5);
    bestRows.replaceChildren(...ranked.map((one, at) => el("tr", { class: at ? "" : "on" }, el("th", { scope: "row", title: parts.names[one.at] }, parts.names[one.at]),
      ...[one.total, one.edge, one.transfer, one.cloud].map((seconds) => el("td", { class: "n" }, write("seconds", seconds))),
      el("td", { class: "n" }, sends(one)))));
  }

  const sends = (one) => (parts.crosses[one.at] ? write("bytes", parts.sent[one.at]) : UNKNOWN);
  const describe = (one) => `${write("seconds", one.total)}: edge ${write("seconds", one.edge)}, link ${write("seconds", one.transfer)}, cloud ${write("seconds", one.cloud)}` + (parts.crosses[one.at] ? `; sends ${write("bytes", parts.sent[one.at])}` : "; sends nothing");

  // -- which bars ------------------------------------------------------------------------------------------------------

  let bars = [];
  /** The bars in sight: groups of neighbours, each with its best candidate. Those without a cut stand alone. */
  function barsInSight() {
    const { from, to } = zoomed.at(-1);
    const most = Math.max(Math.floor(place.clientWidth / BAR_WIDTH) - 6, 8);
    const inner = [Math.max(from, cloudOnly.length), Math.min(to, order.length - 1)];
    const single = (at) => ({ from: at, to: at + 1, name: names[at] });
    const groups = [
      ...Array.from({ length: Math.max(inner[0] - from, 0) }, (_, at) => single(from + at)),
      ...(inner[1] > inner[0] ? groupNames(names, ...inner, most) : []),
      ...(to === order.length ? [single(to - 1)] : []),
    ];
    return groups.map((group) => {
      let least = priced[order[group.from]];
      for (let at = group.from; at < group.to; at++) if (priced[order[at]].total < least.total) least = priced[order[at]];
      return { ...group, best: least, isGroup: group.to - group.from > 1 };
    });
  }

  function labels() {
    const isWhole = (bar) => parts.baseline[bar.best.at] && !bar.isGroup;
    const ends = distinctEnds(bars.map((bar) => (isWhole(bar) ? "" : bar.name)));
    return bars.map((bar, at) => {
      const name = isWhole(bar) ? bar.name.replace(/^all on /, "") : ends[at];
      const text = name.length <= LABEL ? name : `${name.slice(0, 6)}…${name.slice(7 - LABEL)}`;
      return bar.isGroup ? `${text} ▸` : text;
    });
  }

  function zoomTo(group) {
    if (group.to - group.from < 2 || (group.from === zoomed.at(-1).from && group.to === zoomed.at(-1).to)) return;
    zoomed.push({ from: group.from, to: group.to, name: group.name });
    draw();
  }

  function drawCrumbs() {
    const buttons = zoomed.map((one, level) => el("button", { type: "button", disabled: level === zoomed.length - 1, onclick: () => { zoomed = zoomed.slice(0, level + 1); draw(); } }, one.name));
    crumbs.replaceChildren(...buttons.flatMap((button, level) => (level ? ["›", button] : [button])));
  }

  // -- drawing ---------------------------------------------------------------------------------------------------------

  let chart;
  let current = -1;
  function draw() {
    bars = barsInSight();
    current = -1;
    tip.hidden = true;
    const cloudLine = Math.min(...cloudOnly.map((at) => priced[at].total));
    const edgeLine = priced[edgeOnly].total;
    const totals = bars.map((bar) => bar.best.total).sort((a, b) => a - b);
    const top = Math.min(totals.at(-1), Math.max(3 * best.total, 1.2 * totals[totals.length >> 1]));
    const most = top * 1.08 || 1;
    const within = (text, seconds) => (seconds > most ? `${text}: ${write("seconds", seconds)}, off the scale` : text);
    marks.replaceChildren(key([ink("edge"), "edge"], [ink("link"), "link"], [ink("cloud"), "cloud"],
      [ink("ink"), within("all on the edge", edgeLine), "dashed"], [ink("ink"), within("all on the cloud", cloudLine), "dotted"], [ink("payload"), "bytes sent, below"]));
    drawCrumbs();
    const xs = bars.map((_, at) => at);
    const written = labels();
    const wide = (place.clientWidth - 90) / bars.length;
    const longest = Math.max(...written.map((text) => text.length));
    const isFlat = longest * 7 < wide;
    const deep = 16 + 5.2 * longest;
    const filled = (colour) => ({ fill: colour, stroke: colour, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.86, 56] }) });
    const line = (dash) => ({ stroke: ink("ink"), dash, width: 1.5, points: { show: false } });
    const shared = { cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } } };
    const range = [-0.6, bars.length - 0.4];
    const bestBar = bars.findIndex((bar) => order.indexOf(best.at) >= bar.from && order.indexOf(best.at) < bar.to);
    const ends = [-1, ...xs, bars.length]; // beyond the sides, so that lines reach them
    const around = (values) => [null, ...values, null];
    chart = plot(place, {
      ...shared,
      height: 300,
      padding: [ABOVE, 12, 0, 0],
      scales: { x: { time: false, range }, y: { range: [0, most] } },
      axes: [axis(() => "", { size: 6, grid: { show: false }, ticks: { show: false } }), axis((n) => WRITERS.seconds(n), { size: 70 })],
      series: [{}, filled(ink("cloud")), filled(ink("link")), filled(ink("edge")), line([9, 6]), line([2, 4])],
      hooks: {
        draw: [(drawnChart) => { if (bestBar >= 0) markAt(drawnChart, bestBar, `best: ${parts.names[best.at]}`, ink("best")); }],
        setCursor: [(one) => hover(one)],
        setSelect: [(one) => selected(one)],
      },
    }, [
      ends, around(bars.map(({ best: one }) => one.total)), around(bars.map(({ best: one }) => one.edge + one.transfer)), around(bars.map(({ best: one }) => one.edge)),
      ends.map(() => edgeLine), ends.map(() => cloudLine),
    ]);
    const sent = bars.map(({ best: one }) => (parts.crosses[one.at] ? Math.max(parts.sent[one.at], 1) : null));
    const known = sent.filter((nbytes) => nbytes !== null);
    const limits = [Math.min(...known, 1024), Math.max(...known, 2048)].map((nbytes, end) => 1024 ** (Math[end ? "ceil" : "floor"](3 * Math.log(nbytes) / Math.log(1024)) / 3));
    plot(payload, {
      ...shared,
      height: 72 + (isFlat ? 28 : deep),
      padding: [6, 12, 0, 0],
      scales: { x: { time: false, range }, y: { distr: 3, range: limits } },
      axes: [
        axis((n) => written[n] ?? "", { grid: { show: false }, space: 14, rotate: isFlat ? 0 : 50, size: isFlat ? 28 : deep, gap: isFlat ? 5 : 2, splits: () => xs.filter((at) => at % Math.ceil(15 / wide) === 0) }),
        axis((n) => WRITERS.bytes(n).replace(/\.0+(?= )/, ""), { size: 70, splits: () => [32, 1024, 32768, 1024 ** 2, 32 * 1024 ** 2, 1024 ** 3].filter((nbytes) => nbytes >= limits[0] && nbytes <= limits[1]), filter: (_, ticks) => ticks }),
      ],
      series: [{}, filled(ink("payload"))],
      hooks: { setCursor: [(one) => hover(one)], setSelect: [(one) => selected(one)] },
    }, [ends, around(sent)]);
    chartBox.dataset.bars = bars.length;
    status.textContent = "";
  }

  // -- the row under the cursor ----------------------------------------------------------------------------------------

  function hover(one) {
    const at = one.cursor.left >= 0 ? Math.round(one.posToVal(one.cursor.left, "x")) : -1;
    if (at === current) return;
    current = bars[at] ? at : -1;
    showRow();
  }

  function showRow() {
    const bar = bars[current];
    tip.hidden = !bar;
    status.textContent = bar ? `${parts.names[bar.best.at]}: ${describe(bar.best)}` : "";
    if (!bar) return;
    const { best: one } = bar;
    const rows = [["edge", write("seconds", one.edge)], ["link", write("seconds", one.transfer)], ["cloud", write("seconds", one.cloud)], ["total", write("seconds", one.total)], ["sends", sends(one)]];
    tip.replaceChildren(
      el("b", {}, parts.names[one.at]),
      el("table", {}, el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((text) => el("td", {}, text)))))),
      ...(bar.isGroup ? [el("small", {}, `the best of ${bar.to - bar.from} cuts in ${bar.name}: click to see them`)] : []));
    placeTip(tip, chartBox, chart.over.offsetLeft + chart.valToPos(current, "x"), 130);
  }

  function selected(one) {
    const { left, width } = one.select;
    if (width < 6) return;
    const [from, to] = [left, left + width].map((x) => Math.min(Math.max(Math.round(one.posToVal(x, "x")), 0), bars.length - 1));
    one.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    zoomTo({ from: bars[from].from, to: bars[to].to, name: `${bars[from].name} to ${bars[to].name}` });
  }

  let pressedAt = 0;
  chartBox.addEventListener("pointerdown", (event) => { pressedAt = event.clientX; });
  chartBox.addEventListener("click", (event) => { if (bars[current] && Math.abs(event.clientX - pressedAt) < 6) zoomTo(bars[current]); });
  chartBox.addEventListener("mouseleave", () => { current = -1; showRow(); });
  chartBox.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) {
      current = Math.min(Math.max(current + step, 0), bars.length - 1);
      showRow();
    } else if (event.key === "Enter" && bars[current]) zoomTo(bars[current]);
    else if (event.key === "Escape" && zoomed.length > 1) { zoomed.pop(); draw(); }
    else return;
    event.preventDefault();
  });

  price();
  drawn(view, draw);
}
