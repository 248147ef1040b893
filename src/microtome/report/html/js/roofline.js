// Intensity against achieved rate, of every layer that was timed: in the colour of its kind, as large as its time.
const NAMED_POINTS = 6;
const [SMALL, LARGE] = [2.5, 12];

function rooflineView(view) {
  const clock = METRICS.device_s.missing === null ? "device_s" : "time_s";
  const points = [];
  const without = { time: 0, FLOPs: 0, "moved bytes": 0 };
  let layers = 0;
  for (let at = 0; at < COUNT; at++) {
    if (CHILDREN[at].length) continue;
    const [seconds, flops, moved] = [valueOf(clock, at), valueOf("flops", at), valueOf("moved_bytes", at)];
    layers++;
    if (!(seconds > 0)) without.time++;
    else if (!(flops > 0)) without.FLOPs++;
    else if (!(moved > 0)) without["moved bytes"]++;
    else points.push({ at, seconds, x: flops / moved, y: flops / seconds, speed: moved / seconds });
  }
  const missing = Object.entries(without).filter(([, count]) => count).map(([name, count]) => `${grouped(count)} without ${name}`).join(", ");
  if (!points.length) {
    view.append(el("p", { class: "reason" }, `– No layer has a time, FLOPs and moved bytes: ${missing}.`));
    return;
  }
  points.sort((a, b) => b.seconds - a.seconds || a.at - b.at);
  const peak = Math.max(...points.map((point) => point.y));
  const speed = Math.max(...points.map((point) => point.speed));
  const radius = (point) => Math.max(LARGE * Math.sqrt(point.seconds / points[0].seconds), SMALL);
  const place = el("div");
  const status = el("div", { class: "status dim", "aria-live": "polite" });
  const marks = el("div");
  const drawnLayers = `${grouped(points.length)} of ${grouped(layers)} layer${layers === 1 ? "" : "s"} ${points.length === 1 ? "is" : "are"} drawn`;
  const single = points.length === 1 ? " The roof is the best rate of any layer, so a single layer is on it." : "";
  view.append(marks, place, status, el("div", { class: "omitted dim" }, missing || single ? `${drawnLayers}${missing && `; ${missing}`}.${single}` : ""));

  function say(point) {
    status.replaceChildren(link(CALLS.address[point.at]), ` ${typeOf(point.at)}: ${write("ratio", point.x)} FLOPs/B, ${write("count", point.y)}FLOP/s, ${write("bytes", point.speed)}/s, ${write("seconds", point.seconds)} of ${METRICS[clock].label}`);
  }

  drawn(view, () => {
    const types = [...new Set(points.map((point) => CALLS.type[point.at]))].sort((a, b) => RANK.get(a) - RANK.get(b));
    const named = types.filter((type) => RANK.get(type) < KINDS.length);
    marks.replaceChildren(key(
      ...named.map((type) => [rgb(kindColour(type)), CALLS.types[type]]),
      ...(named.length < types.length ? [[rgb(OTHER_KIND), "other kinds"]] : []),
      [ink("dim"), "the best that any layer reached here: not the limit of the machine", "dashed"]));
    const xs = points.map(({ x }) => x);
    const ends = [10 ** Math.floor(Math.log10(Math.min(...xs)) - 0.05), 10 ** Math.ceil(Math.log10(Math.max(...xs)) + 0.05)];
    const heights = [10 ** Math.floor(Math.log10(Math.min(...points.map(({ y }) => y))) - 0.05), 10 ** Math.ceil(Math.log10(peak) + 0.05)];
    const roof = [ends[0], Math.min(Math.max(peak / speed, ends[0]), ends[1]), ends[1]];
    plot(place, {
      height: 380,
      padding: [12, 16, 0, 0],
      cursor: { y: false, x: false, points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false, distr: 3, range: ends }, y: { distr: 3, range: heights } },
      axes: [
        axis((n) => threeDigits(n), { size: 28, label: "FLOPs for each byte moved", splits: decades, filter: (_, ticks) => ticks }),
        axis((n) => WRITERS.count(n).replace(/\.0+(?= |$)/, ""), { size: 58, label: "FLOP/s achieved", splits: decades, filter: (_, ticks) => ticks }),
      ],
      series: [{}, { stroke: ink("dim"), dash: [6, 5], width: 1.5, points: { show: false } }],
      hooks: { draw: [drawPoints], setCursor: [(chart) => say(nearest(chart) ?? points[0])] },
    }, [roof, roof.map((x) => Math.min(peak, x * speed))]);
    say(points[0]);
  });

  /** The points, the largest first so that none is hidden, and the names of the costliest where there is room. */
  function drawPoints(chart) {
    const { ctx } = chart;
    const ratio = devicePixelRatio || 1;
    const placed = points.map((point) => ({ point, x: chart.valToPos(point.x, "x", true), y: chart.valToPos(point.y, "y", true), r: radius(point) * ratio }));
    ctx.save();
    ctx.lineWidth = ratio;
    ctx.setLineDash([]);
    for (const { point, x, y, r } of placed) {
      ctx.fillStyle = ctx.strokeStyle = rgb(kindColour(CALLS.type[point.at]));
      ctx.beginPath();
      ctx.arc(x, y, r, 0, 2 * Math.PI);
      ctx.globalAlpha = 0.45;
      ctx.fill();
      ctx.globalAlpha = 1;
      ctx.stroke();
    }
    ctx.font = FONT.replace(/^\d+/, 12 * ratio);
    ctx.fillStyle = ink("ink");
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    const taken = placed.map(({ x, y, r }) => [x - r, y - r, x + r, y + r]);
    const roof = (x) => chart.valToPos(Math.min(peak, chart.posToVal(x / ratio - chart.bbox.left / ratio, "x") * speed), "y", true);
    for (const { point, x, y, r } of placed.slice(0, NAMED_POINTS)) {
      const text = fullName(point.at);
      const wide = ctx.measureText(text).width;
      const gap = r + 5 * ratio;
      const spots = [[x + gap, y], [x - gap - wide, y], [x - wide / 2, y + gap + 6 * ratio], [x - wide / 2, y - gap - 6 * ratio]];
      for (const [left, middle] of spots) {
        const box = [left, middle - 8 * ratio, left + wide, middle + 8 * ratio];
        const isInside = left > chart.bbox.left && box[2] < chart.bbox.left + chart.bbox.width && box[3] < chart.bbox.top + chart.bbox.height;
        const isOnRoof = [box[0], box[2]].some((end) => roof(end) > box[1] - 2 && roof(end) < box[3] + 2);
        if (!isInside || isOnRoof || taken.some(([a, b, c, d]) => a < box[2] && c > box[0] && b < box[3] && d > box[1])) continue;
        ctx.fillText(text, left, middle);
        taken.push(box);
        break;
      }
    }
    ctx.restore();
  }

  function nearest(chart) {
    const { left, top } = chart.cursor;
    if (!(left >= 0) || !(top >= 0)) return null;
    const away = (point) => (chart.valToPos(point.x, "x") - left) ** 2 + (chart.valToPos(point.y, "y") - top) ** 2;
    return points.reduce((best, point) => (away(point) < away(best) ? point : best));
  }
}
