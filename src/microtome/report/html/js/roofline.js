// Intensity against achieved rate, of every layer that was timed.
const COSTLIEST = 10;

function rooflineView(view) {
  const clock = METRICS.device_s.missing === null ? "device_s" : "time_s";
  const points = [];
  for (let at = 0; at < COUNT; at++) {
    const [seconds, flops, moved] = [valueOf(clock, at), valueOf("flops", at), valueOf("moved_bytes", at)];
    if (!CHILDREN[at].length && seconds > 0 && flops > 0 && moved > 0) points.push({ at, seconds, x: flops / moved, y: flops / seconds, speed: moved / seconds });
  }
  if (!points.length) {
    view.append(el("p", { class: "reason" }, "– No layer has a time, FLOPs and bytes: there is nothing to place."));
    return;
  }
  points.sort((a, b) => a.x - b.x || a.at - b.at);
  const costly = new Set([...points].sort((a, b) => b.seconds - a.seconds).slice(0, COSTLIEST));
  const peak = Math.max(...points.map((point) => point.y));
  const speed = Math.max(...points.map((point) => point.speed));
  const place = el("div");
  const status = el("div", { class: "status dim", "aria-live": "polite" });
  const marks = el("div");
  view.append(marks, place, status);

  function say(point) {
    status.replaceChildren(link(CALLS.address[point.at]), ` ${typeOf(point.at)}: ${write("ratio", point.x)} FLOPs/B, ${write("count", point.y)}FLOP/s, ${write("bytes", point.speed)}/s, ${write("seconds", point.seconds)} of ${METRICS[clock].label}`);
  }

  drawn(view, () => {
    marks.replaceChildren(key(
      [ink("head"), "a layer"], [ink("payload"), `the ${costly.size} that take the longest`],
      [ink("dim"), "the best that any layer reached here: not the limit of the machine", "dashed"]));
    const dots = (colour, size) => ({ stroke: colour, paths: () => null, points: { show: true, size, fill: colour, stroke: colour } });
    // The roof has a corner, and reaches the ends of the axis: places where no layer need be.
    const ends = [10 ** Math.floor(Math.log10(points[0].x)), 10 ** Math.ceil(Math.log10(points.at(-1).x * 1.0001))];
    const places = [...points, ...[...ends, peak / speed].map((x) => ({ x }))].sort((a, b) => a.x - b.x);
    const rates = (isCostly) => places.map((place) => (place.y !== undefined && costly.has(place) === isCostly ? place.y : null));
    plot(place, {
      height: 320,
      cursor: { y: false, points: { show: false } },
      scales: { x: { time: false, distr: 3, range: ends }, y: { distr: 3 } },
      axes: [
        axis((n) => threeDigits(n), { label: "FLOPs for each byte moved" }),
        axis((n) => WRITERS.count(n).replace(/\.0+(?= |$)/, ""), { size: 64, label: "FLOP/s achieved" }),
      ],
      series: [{}, dots(ink("head"), 6), dots(ink("payload"), 9), { stroke: ink("dim"), dash: [6, 5], width: 1.5, points: { show: false } }],
      hooks: { setCursor: [(chart) => say(nearest(chart) ?? [...costly][0])] },
    }, [places.map(({ x }) => x), rates(false), rates(true), places.map(({ x }) => Math.min(peak, x * speed))]);
    say([...costly][0]);
  });

  function nearest(chart) {
    const { left, top } = chart.cursor;
    if (!(left >= 0) || !(top >= 0)) return null;
    const away = (point) => (chart.valToPos(point.x, "x") - left) ** 2 + (chart.valToPos(point.y, "y") - top) ** 2;
    return points.reduce((best, point) => (away(point) < away(best) ? point : best));
  }
}
