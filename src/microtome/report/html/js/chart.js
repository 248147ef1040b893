// Shared by the charts: colours of the page, sizes, and when they are drawn.
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const FONT = "12px Inter,system-ui,-apple-system,'Segoe UI',Roboto,sans-serif";

const redraws = [];

/** Draw now, and again when the colours or the width change. */
function drawn(view, draw) {
  let width = view.clientWidth;
  draw();
  redraws.push(draw);
  new ResizeObserver(() => {
    if (view.clientWidth && Math.abs(view.clientWidth - width) > 2) {
      width = view.clientWidth;
      draw();
    }
  }).observe(view);
}
for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", () => redraws.forEach((draw) => draw()));
}

// What is folded is printed, too.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open]):not(.menu)")];
  folded.forEach((one) => { one.open = true; });
});
addEventListener("afterprint", () => folded.forEach((one) => { one.open = false; }));

const axis = (write, extra = {}) => ({
  stroke: ink("dim"),
  grid: { stroke: ink("line"), width: 1 },
  ticks: { stroke: ink("line"), width: 1, size: 5 },
  font: FONT,
  labelFont: FONT,
  labelSize: 18,
  labelGap: 2,
  values: (_, ticks) => ticks.map((tick) => (tick === null ? null : write(tick))),
  ...extra,
});

/** The powers of ten in a range, for logarithmic axes. */
const decades = (_, __, low, high) => {
  const powers = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); 10 ** power <= high * 1.0001; power++) powers.push(10 ** power);
  return powers;
};

/** Draw a chart in place of the previous one. */
function plot(place, options, data) {
  place.replaceChildren();
  return new uPlot({ width: Math.max(place.clientWidth, 200), legend: { show: false }, ...options }, data, place);
}

// The height above a plot that labels of marks take: inside it they would cover its lines.
const ABOVE = 24;

/** A vertical mark with a label above the plot, in a `draw` hook. */
function markAt(chart, x, text, colour) {
  const { ctx, bbox } = chart;
  const left = chart.valToPos(x, "x", true);
  const ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour;
  ctx.lineWidth = 1.5 * ratio;
  ctx.setLineDash([5 * ratio, 4 * ratio]);
  ctx.beginPath();
  ctx.moveTo(left, bbox.top);
  ctx.lineTo(left, bbox.top + bbox.height);
  ctx.stroke();
  if (text) {
    ctx.font = `600 ${FONT.replace(/^\d+/, 12 * ratio)}`;
    const half = ctx.measureText(text).width / 2;
    ctx.textAlign = "center";
    ctx.fillText(text, Math.min(Math.max(left, half + 2 * ratio), ctx.canvas.width - half - 2 * ratio), bbox.top - 8 * ratio);
  }
  ctx.restore();
}

const key = (...entries) =>
  el("div", { class: "key" }, ...entries.map(([colour, text, isLine]) => {
    const patch = el("i", { class: isLine ? `line ${isLine}` : "" });
    if (isLine) patch.style.borderTopColor = colour;
    else patch.style.background = colour;
    return el("span", {}, patch, text);
  }));

/** Show a box beside the cursor of a chart, inside the chart's width. */
function placeTip(tip, place, left, top) {
  tip.hidden = false;
  const isRight = left > place.clientWidth / 2;
  tip.style.left = `${isRight ? Math.max(left - tip.offsetWidth - 16, 0) : Math.min(left + 16, Math.max(place.clientWidth - tip.offsetWidth, 0))}px`;
  tip.style.top = `${Math.max(top - tip.offsetHeight / 2, 0)}px`;
}

// Cividis: the same for all kinds of colour vision, from dark blue to yellow.
const CIVIDIS = [[0, 34, 78], [34, 57, 111], [87, 92, 109], [125, 124, 120], [166, 157, 117], [211, 193, 100], [254, 232, 56]];

function cividis(part) {
  const at = Math.min(Math.max(part, 0), 1) * (CIVIDIS.length - 1);
  const low = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return CIVIDIS[low].map((start, channel) => Math.round(start + (at - low) * (CIVIDIS[low + 1][channel] - start)));
}

const rgb = (colour) => `rgb(${colour.join(",")})`;
const inkOn = ([red, green, blue]) => (0.299 * red + 0.587 * green + 0.114 * blue > 130 ? "#14181c" : "#fff");
