// Elements. Names of modules are untrusted: text goes in as text nodes, nowhere as markup.

/** An element with properties, `class`, `aria-…`, `role` and listeners (`on…`), and children: elements or texts. */
function el(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function svgLine(attributes, tooltip) {
  const space = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(space, "svg");
  const line = document.createElementNS(space, "line");
  const title = document.createElementNS(space, "title");
  title.textContent = tooltip;
  picture.setAttribute("class", "w");
  for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
  picture.append(title, line);
  return picture;
}

/** A choice among `[value, label, reason why not]`. */
function chooser(label, options, chosen, change) {
  const items = options.map(([value, text, why]) =>
    el("option", { value, selected: value === chosen, disabled: Boolean(why), title: why || "" }, why ? `${text} (not known)` : text),
  );
  const select = el("select", { "aria-label": label, onchange: () => change(select.value) }, ...items);
  return el("label", {}, label, select);
}

/** Fades the right edge of a box while there is more beside, its scroll bar left out. */
function sideways(box) {
  const update = () => {
    box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    box.style.setProperty("--gutter", `${box.offsetWidth - box.clientWidth}px`);
  };
  box.addEventListener("scroll", update, { passive: true });
  const resized = new ResizeObserver(update);
  for (const one of [box, ...box.children]) resized.observe(one);
}

/** A link to a call in the table; the root is where one begins. */
const link = (address, text) => (address ? el("a", { href: `#${encodeURIComponent(address)}` }, text ?? address) : el("span", {}, text ?? "(root)"));

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { value: text, class: "sr" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** The empty place of a section that a view is drawn into; null where Python wrote the reason why there is none. */
const viewOf = (name) => document.getElementById(`section:${name}`)?.querySelector(".view") ?? null;
