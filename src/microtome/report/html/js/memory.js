// Live bytes at each operator, the peak marked.
function memoryView(view) {
  const { live_bytes: live, calls, forward, peak, model_bytes: modelBytes } = DATA.memory;
  // Where weights dominate, an axis from zero would flatten the rest.
  let isFromZero = modelBytes <= live[peak] / 2;
  const place = el("div");
  const marks = el("div");
  const status = el("div", { class: "status dim", "aria-live": "polite" });
  const box = el("input", { type: "checkbox", checked: isFromZero, onchange: () => { isFromZero = box.checked; draw(); } });
  view.append(el("div", { class: "controls" }, el("label", {}, box, "from zero")), marks, place, status);

  function say(at) {
    const phase = at < forward ? "" : ", of the backward";
    const parts = modelBytes ? `, ${write("bytes", live[at] - modelBytes)} of them besides the model's` : "";
    status.replaceChildren(`Operator ${at + 1} of ${live.length}${phase}: ${write("bytes", live[at])} live${parts}, in `, link(CALLS.address[calls[at]]), at === peak ? " – the peak" : "");
  }

  // Operators count from 1, and each is as wide as from half before its number to half after.
  const operatorAt = (x) => Math.min(Math.max(Math.round(x), 1), live.length) - 1;

  const draw = () => {
    const above = live[peak] - modelBytes;
    const low = isFromZero ? 0 : Math.max(modelBytes - 0.08 * above, 0);
    const steps = (colour, opacity) => ({ stroke: colour, fill: colour + opacity, width: 1.5, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } });
    const flat = { fill: ink("box"), stroke: ink("dim"), width: 1, points: { show: false } };
    marks.replaceChildren(key(
      [ink("edge"), `tensors of the run: ${write("bytes", above)} at the peak`],
      [ink("box"), `weights and buffers: ${write("bytes", modelBytes)}, all the time${low ? " (the axis begins near them, not at zero)" : ""}`]));
    const xs = Float64Array.from({ length: live.length + 1 }, (_, at) => at + 0.5);
    plot(place, {
      height: 270,
      padding: [ABOVE, 12, 0, 0],
      cursor: { y: false, points: { show: false } },
      scales: { x: { time: false, range: [0.5, live.length + 0.5] }, y: { range: () => [low, live[peak] + 0.06 * (live[peak] - low) || 1] } },
      axes: [
        axis(grouped, { size: 28, incrs: steps10(), label: forward < live.length ? `operators: ${forward} of the forward, then the backward` : "operators, in the order they ran" }),
        axis(WRITERS.bytes, { size: 74, incrs: steps1024() }),
      ],
      series: [{}, steps(ink("edge"), "40"), flat],
      hooks: {
        draw: [(chart) => {
          markAt(chart, peak + 1, `peak ${write("bytes", live[peak])}`, ink("payload"));
          if (forward < live.length) markAt(chart, forward + 0.5, "", ink("dim"));
        }],
        setCursor: [(chart) => say(chart.cursor.left >= 0 ? operatorAt(chart.posToVal(chart.cursor.left, "x")) : peak)],
      },
    }, [xs, [...live, live.at(-1)], Array.from(xs, () => modelBytes)]);
    say(peak);
  };
  drawn(view, draw);
}

const steps1024 = () => Array.from({ length: 6 }, (_, power) => [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].map((n) => n * 1024 ** power)).flat();
const steps10 = () => Array.from({ length: 9 }, (_, power) => [1, 2, 5].map((n) => n * 10 ** power)).flat();
