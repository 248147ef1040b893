// Live bytes at each operator, the peak marked.
function memoryView(view) {
  const { live_bytes: live, calls, forward, peak, model_bytes: modelBytes } = DATA.memory;
  let isBare = modelBytes > live[peak] / 2;
  const place = el("div");
  const status = el("div", { class: "status dim", "aria-live": "polite" });
  const box = el("input", { type: "checkbox", checked: isBare, onchange: () => { isBare = box.checked; draw(); } });
  view.append(el("div", { class: "controls" }, el("label", {}, box, `leave out what the model holds: ${write("bytes", modelBytes)} of weights and buffers`)), place, status);

  function say(at) {
    const phase = at < forward ? "" : ", of the backward";
    status.replaceChildren(`Operator ${at + 1} of ${live.length}${phase}: ${write("bytes", live[at])} live, in `, link(CALLS.address[calls[at]]), at === peak ? " – the peak" : "");
  }

  // Operators count from 1, and each is as wide as from half before its number to half after.
  const operatorAt = (x) => Math.min(Math.max(Math.round(x), 1), live.length) - 1;

  const draw = () => {
    const base = isBare ? modelBytes : 0;
    plot(place, {
      height: 260,
      cursor: { y: false, points: { show: false } },
      scales: { x: { time: false, range: [0.5, live.length + 0.5] }, y: { range: (_, __, most) => [0, most * 1.12 || 1] } },
      axes: [
        axis(grouped, { incrs: steps10(), label: forward < live.length ? `operators: ${forward} of the forward, then the backward` : "operators, in the order they ran" }),
        axis(WRITERS.bytes, { size: 74, incrs: steps1024() }),
      ],
      series: [{}, { stroke: ink("head"), fill: `${ink("head")}33`, width: 1.5, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }],
      hooks: {
        draw: [(chart) => {
          markAt(chart, peak + 1, `peak ${write("bytes", live[peak])}${base ? ", all counted" : ""}`, ink("payload"));
          if (forward < live.length) markAt(chart, forward + 0.5, "", ink("dim"));
        }],
        setCursor: [(chart) => say(chart.cursor.left >= 0 ? operatorAt(chart.posToVal(chart.cursor.left, "x")) : peak)],
      },
    }, [Float64Array.from({ length: live.length + 1 }, (_, at) => at + 0.5), [...live, live.at(-1)].map((nbytes) => nbytes - base)]);
    say(peak);
  };
  drawn(view, draw);
}

const steps1024 = () => Array.from({ length: 6 }, (_, power) => [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].map((n) => n * 1024 ** power)).flat();
const steps10 = () => Array.from({ length: 9 }, (_, power) => [1, 2, 5].map((n) => n * 10 ** power)).flat();
