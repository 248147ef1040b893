// The module tree as an icicle: as wide as what a call costs, zoomed by click or Enter.
const NODE_HEIGHT = 30;
const LEVELS = 14;
const NARROW = 2;
const NAMED = 5;
const GREY = [200, 206, 212];
// Parts that exceed the whole by less are not worth a word.
const EXCESS = 0.001;
// What several calls run besides the calls inside them.
const BETWEEN = "operators between modules";
// What calls take that run no operator besides those inside them.
const NO_OPERATORS = "(no operators)";
const UNMEASURED = "not measured by layer";

function icicle(view) {
  const sums = DATA.metrics.filter((metric) => metric.is_sum);
  const first = ["device_s", "time_s", "macs", "flops", "params"].find((name) => valueOf(name, 0));
  let size = first ?? KNOWN.find((metric) => metric.is_sum).name;
  let colour = "type";
  let root;
  let focus = 0;
  let nodes = [];
  const costs = [];

  const options = (metrics) => metrics.map((metric) => [metric.name, metric.label, metric.missing]);
  const crumbs = el("nav", { class: "crumbs", "aria-label": "Zoomed to" });
  const picture = el("div", { class: "icicle", role: "tree", "aria-label": "Module tree; arrows move, Enter zooms, Escape zooms out" });
  const status = el("div", { class: "status dim", "aria-live": "polite" });
  const left = el("div", { class: "left dim" });
  const ramp = el("canvas", { width: 144, height: 1 });
  const most = el("span", {});
  const least = el("span", {});
  const legend = el("span", { class: "ramp" }, least, ramp, most);
  const kinds = el("div", { class: "kinds" });
  const colours = [["type", "kind of module"], ["same", "the same as size"], ...options(DATA.metrics.filter((metric) => metric.missing === null))];
  view.append(
    el("div", { class: "controls" },
      chooser("Size", options(sums), size, (name) => { size = name; layout(); draw(); }),
      chooser("Color", colours, colour, (name) => { colour = name; draw(); }),
      legend),
    kinds, crumbs, picture, status, left);

  const inside = (at) => CHILDREN[at].reduce((sum, child) => sum + (costs[child] ?? 0), 0);
  /** What a call with calls inside costs besides them. */
  const own = (at) => (CHILDREN[at].length ? Math.max(costs[at] - inside(at), 0) : 0);
  /** Whether what a call costs besides the calls inside it is also that of calls that were not measured. */
  const isUnmeasured = (at) => METRICS[size].is_measured && CHILDREN[at].some((child) => valueOf(size, child) === null);
  /** The name of the part beside the calls inside a call, as in the table; all calls down to the measured depth have a value. */
  function restName(at) {
    if (!isUnmeasured(at)) return OWN_OF.has(at) ? nameOf(OWN_OF.get(at)) : BETWEEN;
    const above = DEPTH.reduce((least, depth, at) => (valueOf(size, at) === null ? Math.min(least, depth) : least), Infinity);
    return `${UNMEASURED} (depth ${above - 1})`;
  }
  /** By which part of a call the calls inside it take more than it: medians need not add up. */
  const excess = (at) => (costs[at] && inside(at) / costs[at] > 1 + EXCESS ? inside(at) / costs[at] - 1 : 0);

  /** A call is as wide as its share of the call around it, and where the parts exceed that they are drawn to fit. */
  function layout() {
    for (let at = COUNT - 1; at >= 0; at--) costs[at] = valueOf(size, at) ?? inside(at);
    root = d3.hierarchy(0, (at) => CHILDREN[at]);
    root.eachBefore((node) => {
      node.value = costs[node.data] * (node.parent?.scale ?? 1);
      node.scale = node.value / Math.max(costs[node.data], inside(node.data)) || 0;
    });
    d3.partition()(root);
    nodes = [];
    root.each((node) => { nodes[node.data] = node; });
  }

  /** The colour of each call, and the legend that explains it. */
  function painter() {
    const all = nodes[focus].descendants().map((node) => node.data);
    legend.hidden = colour === "type";
    kinds.hidden = colour !== "type";
    if (colour === "type") {
      kinds.replaceChildren(key(...kindsIn(all)));
      return (at) => (CHILDREN[at].length ? null : kindColour(CALLS.type[at]));
    }
    const name = colour === "same" ? size : colour;
    // A peak begins at what the model holds: all the calls share that.
    const { base, unit, label } = METRICS[name];
    const top = all.reduce((most, at) => Math.max(most, valueOf(name, at) ?? 0), 0);
    const isUnknown = all.some((at) => valueOf(name, at) === null);
    least.textContent = base ? write(unit, base) : "0";
    most.textContent = `${write(unit, top)} (${label}${focus ? `, the most in ${fullName(focus)}` : ""})${isUnknown ? "; grey: not known" : ""}`;
    paintRamp(ramp);
    return (at) => (valueOf(name, at) === null ? GREY : shade(top > base ? Math.max(valueOf(name, at) - base, 0) / (top - base) : 0));
  }

  /** The kinds among some calls with their colours and shares of the size, the costliest first. */
  function kindsIn(all) {
    const byType = new Map();
    for (const at of all) if (!CHILDREN[at].length) byType.set(CALLS.type[at], (byType.get(CALLS.type[at]) ?? 0) + costs[at]);
    const part = (cost) => (costs[focus] ? ` ${share(cost, costs[focus])}` : "");
    const costing = [...byType].some(([, cost]) => cost) ? [...byType].filter(([, cost]) => cost) : [...byType];
    const ranked = costing.sort((a, b) => b[1] - a[1] || a[0] - b[0]);
    const isNamed = ([type]) => (RANK.get(type) ?? KINDS.length) < KINDS.length;
    const entries = ranked.filter(isNamed).map(([type, cost]) => [rgb(kindColour(type)), `${CALLS.types[type]}${part(cost)}`]);
    const others = ranked.filter((one) => !isNamed(one));
    if (others.length) entries.push([rgb(OTHER_KIND), `${others.length === 1 ? CALLS.types[others[0][0]] : `${others.length} other kinds`}${part(others.reduce((sum, [, cost]) => sum + cost, 0))}`]);
    if (all.some((at) => CHILDREN[at].length)) entries.push([ink("box"), "holds other modules"]);
    const kindOfRest = (at) => (isUnmeasured(at) ? UNMEASURED : restName(at) === NO_OPERATORS ? NO_OPERATORS : BETWEEN);
    for (const kind of [BETWEEN, NO_OPERATORS, UNMEASURED]) {
      const rests = all.filter((at) => own(at) && kindOfRest(at) === kind);
      const rest = rests.reduce((sum, at) => sum + own(at), 0);
      const names = new Set(rests.map(restName));
      if (rest > EXCESS * costs[focus]) entries.push([HATCHED, `${names.size === 1 ? [...names][0] : kind}${part(rest)}`]);
    }
    return entries;
  }

  function draw() {
    const zoomed = nodes[focus];
    const width = picture.clientWidth;
    const wide = zoomed.x1 - zoomed.x0;
    const paint = painter();
    const boxes = [];
    const gaps = [];
    let deepest = 0;
    const visit = (node) => {
      const level = node.depth - zoomed.depth;
      const span = ((node.x1 - node.x0) / (wide || 1)) * width;
      if (node !== zoomed && (level >= LEVELS || !(span >= NARROW))) return;
      deepest = Math.max(deepest, level);
      boxes.push(box(node, level, ((node.x0 - zoomed.x0) / (wide || 1)) * width, node === zoomed ? width : span, paint(node.data)));
      node.children?.forEach(visit);
      const rest = ((node.x1 - (node.children?.at(-1).x1 ?? node.x1)) / (wide || 1)) * width;
      if (own(node.data) > EXCESS * costs[focus] && rest >= NARROW && level + 1 < LEVELS) {
        deepest = Math.max(deepest, level + 1);
        gaps.push(gap(node, level + 1, ((node.x1 - zoomed.x0) / (wide || 1)) * width - rest, rest));
      }
    };
    visit(zoomed);
    picture.style.height = `${(deepest + 1) * NODE_HEIGHT}px`;
    picture.replaceChildren(...boxes, ...gaps);
    picture.dataset.focus = CALLS.address[focus];
    drawCrumbs();
    markFound();
    say(focus);
    sayLeft(new Set(boxes.map((node) => Number(node.dataset.at))));
  }

  /** Fade what a search does not match. */
  function markFound() {
    for (const node of picture.querySelectorAll(".node")) node.classList.toggle("other", SEARCH.isActive() && !SEARCH.found.has(Number(node.dataset.at)));
  }
  SEARCH.listeners.push(markFound);

  /** Say how many of the calls inside the zoomed one are not drawn. */
  function sayLeft(shown) {
    const all = nodes[focus].descendants().map((node) => node.data);
    const { label, unknown: why } = METRICS[size];
    const unknown = all.filter((at) => valueOf(size, at) === null);
    const free = all.filter((at) => valueOf(size, at) === 0).length;
    const hidden = all.filter((at) => valueOf(size, at) && !shown.has(at)).length;
    const over = all.filter((at) => shown.has(at) && excess(at));
    const parts = [];
    if (unknown.length) {
      const names = unknown.slice(0, NAMED).flatMap((at, place) => [place ? ", " : "", link(CALLS.address[at])]);
      const more = unknown.length - NAMED;
      parts.push(`${UNKNOWN} ${label} of ${calls(unknown.length)} not known${why ? ` (${why})` : ""}: `, ...names, more > 0 ? ` and ${grouped(more)} more. ` : ". ");
    }
    if (hidden) parts.push(`${calls(hidden)} ${hidden === 1 ? "is" : "are"} too narrow or too deep to draw: zoom in. `);
    if (free) parts.push(`${calls(free)} cost${free === 1 ? "s" : ""} nothing. `);
    if (over.length) parts.push(`In ${calls(over.length)} the parts take more than the whole, by up to ${share(Math.max(...over.map(excess)), 1)}${apart()}: they are drawn to fit.`);
    left.replaceChildren(...parts);
  }

  function box(node, level, left, span, paint) {
    const at = node.data;
    const element = el("div", {
      class: "node", role: "treeitem", tabIndex: at === focus ? 0 : -1, "aria-level": level + 1,
      "aria-label": `${fullName(at)}, ${typeOf(at)}, ${METRICS[size].label} ${formatted(size, at)}`,
      "aria-expanded": CHILDREN[at].length ? "true" : null,
      onclick: () => zoom(at), onfocus: () => say(at), onmouseenter: () => say(at),
    }, labelOf(at, span));
    element.dataset.at = at;
    element.style.left = `${left}px`;
    element.style.width = `${span}px`;
    element.style.top = `${level * NODE_HEIGHT}px`;
    element.style.background = paint ? rgb(paint) : "var(--box)";
    element.style.color = paint ? inkOn(paint) : "var(--ink)";
    if (span < 14) element.style.padding = "0";
    return element;
  }

  /** The place beside the calls inside a call: what its own operators cost, or calls that were not measured. */
  function gap(node, level, left, span) {
    const name = restName(node.data);
    const text = `${name}: ${share(own(node.data), valueOf(size, 0))} of ${METRICS[size].label}, in ${fullName(node.data)}`;
    const element = el("div", { class: "gap", title: text, "aria-hidden": "true" }, span > 44 ? name : "");
    element.style.left = `${left}px`;
    element.style.width = `${span}px`;
    element.style.top = `${level * NODE_HEIGHT}px`;
    if (span < 14) element.style.padding = "0";
    return element;
  }

  /** The name where it fits, or enough of it. */
  function labelOf(at, span) {
    const name = at === 0 ? typeOf(0) : nameOf(at);
    return name.length * 7.5 + 12 <= span || span > 44 ? name : "";
  }

  function zoom(at) {
    focus = at === focus && at !== 0 ? CALLS.parent[at] : at;
    draw();
    picture.querySelector(`[data-at="${focus}"]`)?.focus({ preventScroll: true });
  }

  function drawCrumbs() {
    const parts = pathTo(focus).map((at) => el("button", { type: "button", disabled: at === focus, onclick: () => { focus = at; draw(); } }, nameOf(at)));
    crumbs.replaceChildren(...parts.flatMap((part, at) => (at ? ["›", part] : [part])));
    crumbs.hidden = focus === 0;
  }

  const calls = (count) => `${grouped(count)} call${count === 1 ? "" : "s"}`;
  const apart = () => (CALLS.spreads[size] ? " (medians of their own)" : "");

  function say(at) {
    const whole = valueOf(size, 0);
    const over = excess(at) ? ` The calls inside take ${share(excess(at), 1)} more than the whole${apart()}.` : "";
    const amounts = KNOWN.filter((metric) => metric.is_shown).map((metric) => `${metric.label} ${formatted(metric.name, at)}`);
    status.replaceChildren(link(CALLS.address[at]), ` ${typeOf(at)}: ${share(valueOf(size, at), whole)} of ${METRICS[size].label}; ${amounts.join(", ")}.${over}`);
  }

  picture.addEventListener("keydown", (event) => {
    const here = event.target.dataset.at;
    if (here === undefined) return;
    const at = Number(here);
    const beside = [...picture.querySelectorAll(".node")].filter((node) => DEPTH[node.dataset.at] === DEPTH[at]);
    const place = beside.indexOf(event.target);
    const go = {
      ArrowUp: () => picture.querySelector(`[data-at="${CALLS.parent[at]}"]`),
      ArrowDown: () => CHILDREN[at].map((child) => picture.querySelector(`[data-at="${child}"]`)).find(Boolean),
      ArrowLeft: () => beside[place - 1],
      ArrowRight: () => beside[place + 1],
    }[event.key];
    if (go) go()?.focus();
    else if (event.key === "Enter" || event.key === " ") zoom(at);
    else if (event.key === "Escape" && focus !== 0) zoom(focus);
    else return;
    event.preventDefault();
  });

  /** Zoom to the call that the address of the page names, or to the call around a single layer. */
  function follow() {
    const { at } = linked();
    if (at === undefined) return false;
    focus = CHILDREN[at].length ? at : Math.max(CALLS.parent[at], 0);
    return true;
  }
  addEventListener("hashchange", () => { if (follow()) draw(); });

  layout();
  follow();
  drawn(view, draw);
}

const HATCHED = "repeating-linear-gradient(135deg, var(--line) 0 2px, transparent 2px 6px)";

// The root of a share, so that layers of a few per cent can be distinguished.
const shade = (part) => cividis(Math.sqrt(part));

function paintRamp(canvas) {
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    context.fillStyle = rgb(shade(x / (canvas.width - 1)));
    context.fillRect(x, 0, 1, 1);
  }
}
