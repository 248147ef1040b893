// Shared by the charts: colours of the page, sizes, and when they are drawn.
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

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

/** Build a view when it comes near the window, or before it is printed. */
function lazily(view, build) {
  if (view === null) return;
  let isBuilt = false;
  const once = () => {
    if (!isBuilt) {
      isBuilt = true;
      build(view);
    }
  };
  const observer = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) {
      observer.disconnect();
      once();
    }
  }, { rootMargin: "300px" });
  observer.observe(view.parentElement);
  addEventListener("beforeprint", once);
}

const axis = (write, extra = {}) => ({
  stroke: ink("dim"),
  grid: { stroke: ink("line"), width: 1 },
  ticks: { stroke: ink("line"), width: 1 },
  font: "12px system-ui,sans-serif",
  labelFont: "12px system-ui,sans-serif",
  labelSize: 18,
  values: (_, ticks) => ticks.map((tick) => (tick === null ? null : write(tick))),
  ...extra,
});

/** Draw a chart in place of the previous one. */
function plot(place, options, data) {
  place.replaceChildren();
  return new uPlot({ width: Math.max(place.clientWidth, 200), legend: { show: false }, ...options }, data, place);
}

/** A vertical mark with a label, in a `draw` hook. */
function markAt(chart, x, text, colour) {
  const { ctx, bbox } = chart;
  const left = chart.valToPos(x, "x", true);
  const ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour;
  ctx.lineWidth = 2 * ratio;
  ctx.setLineDash([5 * ratio, 4 * ratio]);
  ctx.beginPath();
  ctx.moveTo(left, bbox.top);
  ctx.lineTo(left, bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `${600} ${12 * ratio}px system-ui,sans-serif`;
  const wide = ctx.measureText(text).width + 8 * ratio;
  const isRight = left + wide > bbox.left + bbox.width;
  if (text) {
    ctx.fillStyle = ink("paper");
    ctx.fillRect(isRight ? left - wide - 3 * ratio : left + 3 * ratio, bbox.top + ratio, wide, 19 * ratio);
    ctx.fillStyle = colour;
    ctx.textAlign = isRight ? "right" : "left";
    ctx.fillText(text, left + (isRight ? -7 : 7) * ratio, bbox.top + 15 * ratio, bbox.width);
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

// Cividis: the same for all kinds of colour vision, from dark blue to yellow.
const CIVIDIS = [[0, 34, 78], [34, 57, 111], [87, 92, 109], [125, 124, 120], [166, 157, 117], [211, 193, 100], [254, 232, 56]];

function cividis(part) {
  const at = Math.min(Math.max(part, 0), 1) * (CIVIDIS.length - 1);
  const low = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return CIVIDIS[low].map((start, channel) => Math.round(start + (at - low) * (CIVIDIS[low + 1][channel] - start)));
}

// Okabe and Ito's, for kinds.
const KINDS = [[0, 114, 178], [230, 159, 0], [0, 158, 115], [204, 121, 167], [86, 180, 233], [213, 94, 0], [240, 228, 66], [130, 130, 130]];

const rgb = (colour) => `rgb(${colour.join(",")})`;
const inkOn = ([red, green, blue]) => (0.299 * red + 0.587 * green + 0.114 * blue > 130 ? "#14181c" : "#fff");
