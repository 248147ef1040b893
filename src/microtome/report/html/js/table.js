// The layer table: a tree or a sorted list, of which only the rows in sight are in the page.
const ROW_HEIGHT = 27;
const OPEN_AT_FIRST = 100;
const SPARE = 20;
const PRINTED = 2000;
// A time below zero: the calls inside a call sum up to more than its own time.
const NOISE = "noise";

function layerTable(grid) {
  const table = grid.querySelector("table");
  const body = table.tBodies[0];
  const head = table.tHead;
  const longest = (texts) => texts.reduce((most, text) => Math.max(most, text.length), 0);
  const columns = [
    { name: "type", header: "module", label: "module", text: typeOf, cell: kindCell, width: 132, wish: Math.min(7.6 * longest(CALLS.types) + 42, 230) },
    { name: "output", header: "output", label: "output", text: (at) => (isOwn(at) ? "" : CALLS.output[callOf(at)]), width: 128, wish: Math.min(7.6 * longest(CALLS.output) + 24, 230) },
    ...DATA.metrics.map((metric) => ({ ...metric, width: metric.name === "params" && CALLS.shared.some(Boolean) ? 128 : Math.max(96, 8.8 * metric.header.length + 30), isNumber: true })),
  ];
  const texts = innerWidth <= 640 ? [] : ["type", "output"];
  const shown = new Set([...texts, ...KNOWN.filter((metric) => metric.is_shown).map((metric) => metric.name)]);
  const open = new Set();
  let rowsAre = "tree";
  let sort = null;
  let rows = [];
  let active = 0;
  let isPicked = false;
  let isPrinted = false;

  const notFound = el("p", { class: "not-found", role: "alert" });
  const status = el("span", { class: "dim", role: "status" });
  const search = el("input", { type: "search", placeholder: "Search by name or kind", "aria-label": "Search calls by name or kind of module", oninput: () => SEARCH.set(search.value) });
  const mode = chooser("Rows", [["tree", "tree"], ["layers", "layers (no calls inside), operators between modules"], ["all", "all calls"]], rowsAre, (value) => { rowsAre = value; if (value === "tree") sort = null; refresh(); });
  document.getElementById("controls").append(
    el("div", { class: "controls" }, search, mode,
      el("button", { type: "button", onclick: () => { CHILDREN.forEach((inside, at) => inside.length && open.add(at)); refresh(); } }, "Open all"),
      el("button", { type: "button", onclick: () => { open.clear(); open.add(0); refresh(); } }, "Close all"),
      columnMenu(), status), notFound);

  function columnMenu() {
    const boxes = columns.map((column) => {
      const box = el("input", { type: "checkbox", checked: shown.has(column.name), disabled: Boolean(column.missing), onchange: () => { if (box.checked) shown.add(column.name); else shown.delete(column.name); refresh(); } });
      return el("label", { class: column.missing ? "off" : "", title: column.description ?? "" }, box, ` ${column.label}${column.missing ? ` – ${column.missing}` : ""}`);
    });
    return el("details", { class: "menu" }, el("summary", {}, "Columns"), el("div", {}, ...boxes));
  }

  // -- which rows ------------------------------------------------------------------------------------------------------

  function treeRows() {
    const matching = SEARCH.isActive() ? SEARCH.found : null;
    const indices = [];
    const stack = [0];
    while (stack.length) {
      const at = stack.pop();
      if (matching && !matching.has(at)) continue;
      indices.push(at);
      if (matching || open.has(at)) for (let child = childrenOf(at).length - 1; child >= 0; child--) stack.push(CHILDREN[at][child]);
      if (!matching && open.has(at) && OWN_OF.has(at)) stack.push(OWN_OF.get(at));
    }
    return indices;
  }

  function listRows() {
    const indices = [];
    for (let at = 0; at < COUNT; at++) if ((rowsAre === "all" || !CHILDREN[at].length) && (!SEARCH.isActive() || SEARCH.matches(at))) indices.push(at);
    if (rowsAre === "layers") for (const at of OWN_OF.values()) if (!SEARCH.isActive() || SEARCH.matches(at)) indices.push(at);
    if (sort === null) return indices;
    const column = columns.find((one) => one.name === sort.name);
    const of = column ? (column.isNumber ? (at) => valueOf(column.name, at) : column.text) : fullName;
    const sign = sort.isDown ? -1 : 1;
    return indices.sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return (x < y ? -sign : x > y ? sign : 0) || a - b;
    });
  }

  function sortBy(name, isNumber) {
    if (sort?.name !== name) sort = { name, isDown: isNumber };
    else if (sort.isDown === isNumber) sort = { name, isDown: !isNumber };
    else sort = null;
    if (sort && rowsAre === "tree") rowsAre = "layers";
    if (!sort) rowsAre = "tree";
    mode.querySelector("select").value = rowsAre;
    grid.scrollTop = 0;
    refresh();
  }

  // -- drawing ---------------------------------------------------------------------------------------------------------

  // On a narrow screen few columns are in sight: the most telling comes first.
  const telling = ["device_s", "time_s", "macs", "params"].find((name) => valueOf(name, 0));
  const used = () => {
    const chosen = columns.filter((column) => shown.has(column.name));
    return innerWidth <= 640 ? chosen.sort((a, b) => (b.name === telling) - (a.name === telling)) : chosen;
  };

  function refresh() {
    rows = rowsAre === "tree" ? treeRows() : listRows();
    const listed = rows.filter((at) => !isOwn(at)).length;
    status.textContent = `${grouped(listed)} of ${grouped(COUNT)} calls${SEARCH.isActive() ? `, ${grouped(rows.filter(SEARCH.matches).length)} found` : ""}`;
    table.setAttribute("role", rowsAre === "tree" ? "treegrid" : "grid");
    table.setAttribute("aria-rowcount", rows.length + 1);
    drawHead();
    draw();
  }

  function drawHead() {
    const narrow = innerWidth <= 640;
    const widths = [narrow ? 152 : 220, ...used().map((column) => (narrow ? Math.min(column.width, 104) : column.width))];
    let spare = narrow ? 0 : grid.clientWidth - widths.reduce((sum, width) => sum + width, 0);
    used().forEach((column, at) => {
      const more = Math.max(Math.min((column.wish ?? 0) - column.width, spare), 0);
      widths[at + 1] += more;
      spare -= more;
    });
    table.querySelector("colgroup")?.remove();
    // The first column takes what the others leave.
    const group = el("colgroup", {}, ...widths.map((width, place) => { const element = el("col"); if (place || narrow) element.style.width = `${width}px`; return element; }));
    table.insertBefore(group, head);
    table.style.width = `max(100%, ${widths.reduce((sum, width) => sum + width, 0)}px)`;
    const cell = (name, label, isNumber, title) => {
      const isSorted = sort?.name === name;
      const arrow = isSorted ? (sort.isDown ? " ↓" : " ↑") : "";
      return el("th", { scope: "col", class: isNumber ? "n" : "", title, "aria-sort": isSorted ? (sort.isDown ? "descending" : "ascending") : "none" },
        el("button", { type: "button", onclick: () => { sortBy(name, Boolean(isNumber)); head.querySelector(`[data-name="${name}"]`)?.focus(); } }, label + arrow));
    };
    const cells = [cell("address", "call", false, "the address of the call"), ...used().map((column) => cell(column.name, column.header, column.isNumber, column.description ? `${column.label}: ${column.description}${barNote(column)}` : ""))];
    [["address"], ...used().map((column) => [column.name])].forEach(([name], at) => { cells[at].firstChild.dataset.name = name; });
    head.replaceChildren(el("tr", {}, ...cells));
  }

  /** The rows in sight, and so many more on both sides. */
  function range(spare) {
    const first = Math.max(Math.floor(grid.scrollTop / ROW_HEIGHT) - spare, 0);
    return [first, Math.min(Math.ceil((grid.scrollTop + grid.clientHeight) / ROW_HEIGHT) + spare, rows.length)];
  }

  let inPage = [0, 0];
  function draw() {
    const [first, last] = isPrinted ? [0, Math.min(rows.length, PRINTED)] : range(SPARE);
    inPage = [first, last];
    const parts = [space(first)];
    for (let place = first; place < last; place++) parts.push(rowAt(rows[place], place));
    parts.push(space(rows.length - last));
    const focused = document.activeElement?.closest?.("#layers tbody tr")?.dataset.at;
    body.replaceChildren(...parts);
    if (focused !== undefined) body.querySelector(`[data-at="${focused}"]`)?.focus({ preventScroll: true });
  }

  function space(count) {
    const cell = el("td", { colSpan: used().length + 1 });
    cell.style.height = `${count * ROW_HEIGHT}px`;
    const element = el("tr", { class: "space", "aria-hidden": "true" }, cell);
    element.hidden = count === 0;
    return element;
  }

  function rowAt(at, place) {
    const isTree = rowsAre === "tree";
    const element = el("tr", { class: isPicked && at === active ? "on" : "", tabIndex: at === active ? 0 : -1, "aria-rowindex": place + 2,
      "aria-level": isTree ? depthOf(at) + 1 : null, "aria-expanded": isTree && childrenOf(at).length ? String(open.has(at) || SEARCH.isActive()) : null });
    element.dataset.at = at;
    element.append(nameCell(at, isTree), ...used().map((column) => (column.isNumber ? numberCell(column, at) : el("td", { title: column.text(at) }, ...(column.cell ?? ((one) => [column.text(one)]))(at)))));
    return element;
  }

  function nameCell(at, isTree) {
    const element = el("th", { scope: "row", class: isTree ? `d${Math.min(depthOf(at), 32)}` : "", title: fullName(at) });
    const isOpen = open.has(at) || SEARCH.isActive();
    if (isTree) element.append(childrenOf(at).length ? el("button", { class: "twist", type: "button", tabIndex: -1, "aria-label": isOpen ? "Close" : "Open", onclick: () => toggle(at) }, isOpen ? "▾" : "▸") : el("span", { class: "twist" }));
    if (isOwn(at)) {
      element.append(...marked(isTree ? nameOf(at) : fullName(at)));
      return element;
    }
    const anchor = link(CALLS.address[at], "");
    anchor.tabIndex = -1;
    anchor.append(...markedEnd(fullName(at), isTree ? nameOf(at) : fullName(at)));
    const button = el("button", { class: "copy", type: "button", tabIndex: -1, title: "Copy the address", "aria-label": `Copy the address of ${fullName(at)}`, onclick: () => copied(at, button) }, "copy");
    element.append(button, anchor);
    return element;
  }

  function kindCell(at) {
    if (isOwn(at) || CHILDREN[at].length) return marked(typeOf(at));
    const patch = el("span", { class: "kind" });
    patch.style.background = rgb(kindColour(CALLS.type[at]));
    return [patch, ...marked(typeOf(at))];
  }

  const barNote = (metric) => (metric.base ? `; the bar is what is above the model's ${write(metric.unit, metric.base)} of weights and buffers` : "");

  function numberCell(metric, at) {
    const value = valueOf(metric.name, at);
    if (value === null) return el("td", { class: "n", title: metric.missing || metric.unknown }, UNKNOWN);
    const whole = SCALE[metric.name] - metric.base;
    let text = metric.unit === "seconds" && value < 0 ? NOISE : write(metric.unit, value);
    const shared = isOwn(at) ? OWN.shared[at - COUNT] : CALLS.shared[at];
    if (metric.name === "params" && shared) text = value ? `${text} (+${write("count", shared)})` : `(${write("count", shared)})`;
    const part = (end) => Math.min(Math.max(whole ? (end - metric.base) / whole : 0, 0), 1) * 100;
    const element = el("td", { class: `n b${Math.round(part(value))}` }, text);
    if (metric.base) element.title = `${write(metric.unit, Math.max(value - metric.base, 0))} above the model's ${write(metric.unit, metric.base)} of weights and buffers`;
    const spread = CALLS.spreads[metric.name]?.[at];
    if (spread && whole) {
      const interval = `${CALLS.intervals[metric.name]}: ${write(metric.unit, spread[0])} to ${write(metric.unit, spread[1])}`;
      element.append(svgLine({ x1: `${part(spread[0])}%`, x2: `${part(spread[1])}%`, y1: "50%", y2: "50%" }, interval));
      element.title = interval;
    }
    return element;
  }

  // -- moving about ----------------------------------------------------------------------------------------------------

  function toggle(at) {
    if (open.has(at)) open.delete(at);
    else open.add(at);
    refresh();
  }

  async function copied(at, button) {
    if (isOwn(at)) return;
    await copy(CALLS.address[at]);
    if (button) button.textContent = "copied";
    status.textContent = `Copied ${fullName(at)}`;
  }

  function show(at, { isFocused = false } = {}) {
    active = at;
    isPicked = true;
    const place = rows.indexOf(at);
    if (place < 0) return;
    const top = place * ROW_HEIGHT;
    const room = grid.clientHeight - 2 * ROW_HEIGHT;
    if (top < grid.scrollTop) grid.scrollTop = top;
    else if (top > grid.scrollTop + room) grid.scrollTop = top - room / 2;
    draw();
    if (isFocused) body.querySelector(`[data-at="${at}"]`)?.focus({ preventScroll: true });
  }

  /** Show the call that the address of the page names. */
  function follow() {
    const { address, at } = linked();
    const isCall = at !== undefined;
    notFound.textContent = isCall || !address || address.startsWith("section:") ? "" : `There is no call '${address}' in this run.`;
    if (notFound.textContent) notFound.scrollIntoView({ block: "nearest" });
    if (!isCall) return;
    if (rowsAre !== "tree" && !rows.includes(at)) rowsAre = mode.querySelector("select").value = "all";
    if (SEARCH.isActive() && !rows.includes(at)) SEARCH.set(search.value = "");
    for (const up of pathTo(at).slice(0, -1)) open.add(up);
    refresh();
    show(at, { isFocused: true });
    grid.scrollIntoView({ block: "nearest" });
  }

  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    if (row?.dataset.at === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Number(row.dataset.at);
    const place = rows.indexOf(at);
    const page = Math.max(Math.floor(grid.clientHeight / ROW_HEIGHT) - 2, 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length };
    const isTree = rowsAre === "tree";
    if (event.key in steps) show(rows[Math.min(Math.max(place + steps[event.key], 0), rows.length - 1)], { isFocused: true });
    else if (event.key === "ArrowRight" && isTree && childrenOf(at).length && !open.has(at)) toggle(at);
    else if (event.key === "ArrowLeft" && isTree && open.has(at)) toggle(at);
    else if (event.key === "ArrowLeft" && isTree && at) show(isOwn(at) ? callOf(at) : CALLS.parent[at], { isFocused: true });
    else if (event.key === "Enter" && event.target === row && !isOwn(at)) location.hash = encodeURIComponent(CALLS.address[at]);
    else if (event.key === "c") copied(at);
    else return;
    event.preventDefault();
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row?.dataset.at === undefined || event.target.closest("button, a")) return;
    show(Number(row.dataset.at), { isFocused: true });
  });

  let isDue = false;
  grid.addEventListener("scroll", () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      const [first, last] = range(0);
      if (first < inPage[0] || last > inPage[1]) draw();
    });
  }, { passive: true });
  SEARCH.listeners.push(refresh);
  new ResizeObserver(() => refresh()).observe(grid);
  addEventListener("hashchange", follow);
  addEventListener("beforeprint", () => { isPrinted = true; draw(); });
  addEventListener("afterprint", () => { isPrinted = false; draw(); });

  const counts = [];
  for (let at = 0; at < COUNT; at++) counts[DEPTH[at]] = (counts[DEPTH[at]] ?? 0) + 1;
  let room = OPEN_AT_FIRST - counts[0];
  let depth = 0;
  while (depth + 1 < counts.length && (depth === 0 || room >= counts[depth + 1])) room -= counts[++depth];
  for (let at = 0; at < COUNT; at++) if (CHILDREN[at].length && DEPTH[at] < depth) open.add(at);
  grid.removeAttribute("tabindex");
  refresh();
  follow();
}
