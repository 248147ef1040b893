// Where to cut: every candidate of the plan, priced again for the link and the speeds that the sliders say.
// More than so many cuts are thinned to that many, and from some number on bars touch: to fill many apart is slow.
const BARS = 600;
const APART = 200;

function explorerView(view) {
  const parts = DATA.explorer;
  const count = parts.names.length;
  const now = { ...parts.start };
  const edgeOnly = parts.crosses.indexOf(false);
  const cloudOnly = parts.names.map((_, at) => at).filter((at) => parts.baseline[at] && parts.crosses[at]);
  const cuts = parts.names.map((_, at) => at).filter((at) => !parts.baseline[at]);
  const order = [...cloudOnly, ...cuts, edgeOnly];
  let isDue = false;

  const times = (factor) => `× ${threeDigits(factor)}`;
  const powers = Array.from({ length: 14 }, (_, at) => 8 ** at);
  const sliders = [
    slider("bandwidth_bps", "Bandwidth", 4, 10, rate),
    slider("rtt_s", "Round trip", -4, 0, WRITERS.seconds),
    slider("edge", "Edge speed, × this machine", -2, 2, times),
    slider("cloud", `Cloud speed, × ${parts.cloud}`, -1, 3, times),
  ];
  const verdict = el("p", { class: "verdict", "aria-live": "polite" });
  const place = el("div");
  const marks = el("div");
  const status = el("div", { class: "status dim" });
  const bestRows = el("tbody");
  view.append(
    el("div", { class: "sliders" }, ...sliders), verdict, marks, place, status,
    el("div", { class: "scroll short" }, el("table", {}, el("thead", {}, el("tr", {},
      ...["the five best", "total", "edge", "transfer", "cloud", "sends"].map((text, at) => el("th", { scope: "col", class: at ? "n" : "" }, text)))), bestRows)),
    el("p", { class: "dim" }, `Each bar is the time to a result: the edge's part, encoding, sending, decoding and the answer on its way back, and the cloud's part; the tallest are cut off${order.length > BARS ? ", and of neighbours the best is drawn" : ""}. The sliders scale what the model takes; encoding stays as measured.`),
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
      el("td", { class: "n" }, parts.crosses[one.at] ? write("bytes", parts.sent[one.at]) : UNKNOWN))));
  }

  const describe = (one) => `${write("seconds", one.total)}: edge ${write("seconds", one.edge)}, transfer ${write("seconds", one.transfer)}, cloud ${write("seconds", one.cloud)}` + (parts.crosses[one.at] ? `; sends ${write("bytes", parts.sent[one.at])}` : "; sends nothing");

  /** The places in the order that have a bar: all, or of each few neighbours the best. */
  function barred() {
    const few = Math.ceil(order.length / BARS);
    return Array.from({ length: Math.ceil(order.length / few) }, (_, group) => {
      let best = group * few;
      for (let place = best; place < Math.min((group + 1) * few, order.length); place++) if (priced[order[place]].total < priced[order[best]].total) best = place;
      return best;
    });
  }

  function draw() {
    const places = barred();
    const ordered = places.map((place) => priced[order[place]]);
    const cloudLine = Math.min(...cloudOnly.map((at) => priced[at].total));
    const edgeLine = priced[edgeOnly].total;
    const totals = ordered.map((one) => one.total).sort((a, b) => a - b);
    const top = Math.min(totals.at(-1), Math.max(3 * best.total, 1.2 * totals[totals.length >> 1]));
    const most = top * 1.08 || 1;
    const within = (text, seconds) => (seconds > most ? `${text}: ${write("seconds", seconds)}, off the scale` : text);
    const bars = (colour) => ({ fill: colour, stroke: colour, width: 0, points: { show: false }, paths: ordered.length > APART ? uPlot.paths.stepped({ align: 0 }) : uPlot.paths.bars({ size: [0.8, 60] }) });
    const line = (colour, dash) => ({ stroke: colour, dash, width: 2, points: { show: false } });
    marks.replaceChildren(key([ink("head"), "edge"], [ink("between"), "transfer"], [ink("tail"), "cloud"],
      [ink("payload"), "payload (right)", "solid"], [ink("ink"), within("all on the edge", edgeLine), "dashed"], [ink("ink"), within("all on the cloud", cloudLine), "dotted"]));
    plot(place, {
      height: 320,
      cursor: { y: false, points: { show: false } },
      scales: {
        x: { time: false, range: [-0.7, order.length - 0.3] },
        y: { range: [0, most] },
        sent: { distr: 3 },
      },
      axes: [
        axis((n) => (Number.isInteger(n) && order[n] !== undefined ? short(parts.names[order[n]]) : ""), { space: 90, size: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }),
        axis((n) => WRITERS.seconds(n), { size: 66 }),
        axis((n) => WRITERS.bytes(n).replace(/\.0+(?= )/, ""), { side: 1, scale: "sent", size: 66, grid: { show: false }, stroke: ink("payload"), splits: (_, __, low, high) => powers.filter((size) => size >= low && size <= high), filter: (_, ticks) => ticks }),
      ],
      series: [{}, bars(ink("tail")), bars(ink("between")), bars(ink("head")), { ...line(ink("payload")), scale: "sent" }, line(ink("ink"), [9, 6]), line(ink("ink"), [2, 4])],
      hooks: {
        draw: [(chart) => markAt(chart, order.indexOf(best.at), short(parts.names[best.at], 40), ink("best"))],
        setCursor: [(chart) => { const one = ordered[chart.cursor.idx]; status.textContent = one ? `${parts.names[one.at]}: ${describe(one)}` : ""; }],
      },
    }, [
      places,
      ordered.map((one) => one.total), ordered.map((one) => one.edge + one.transfer), ordered.map((one) => one.edge),
      ordered.map((one) => (parts.crosses[one.at] ? Math.max(parts.sent[one.at], 1) : null)),
      ordered.map(() => edgeLine), ordered.map(() => cloudLine),
    ]);
  }

  const short = (name, most = 14) => (name.length <= most ? name : `…${name.slice(1 - most)}`);
  price();
  drawn(view, draw);
}
