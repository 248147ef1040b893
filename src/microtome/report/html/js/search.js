// The search over calls, by name or kind: the table lists what matches, and the tree fades the rest.
const SEARCH = {
  query: "",
  // The calls that match, and the calls that contain them.
  found: new Set(),
  listeners: [],
  isActive: () => SEARCH.query !== "",
  matches: (at) => fullName(at).toLowerCase().includes(SEARCH.query) || typeOf(at).toLowerCase().includes(SEARCH.query),
  set(text) {
    SEARCH.query = text.trim().toLowerCase();
    SEARCH.found = new Set();
    if (SEARCH.isActive()) for (let at = 0; at < COUNT; at++) if (SEARCH.matches(at)) for (const up of pathTo(at)) SEARCH.found.add(up);
    SEARCH.listeners.forEach((listener) => listener());
  },
};

/** A text in which what matches is marked. */
function marked(text) {
  const at = SEARCH.query ? text.toLowerCase().indexOf(SEARCH.query) : -1;
  return at < 0 ? [text] : splitAt(text, at, at + SEARCH.query.length);
}

/** The end of an address, marked where a match of the whole address covers it. */
function markedEnd(address, end) {
  const lower = address.toLowerCase();
  const at = SEARCH.query ? Math.max(lower.lastIndexOf(SEARCH.query), -1) : -1;
  const hidden = address.length - end.length;
  const [from, to] = [Math.max(at - hidden, 0), at + SEARCH.query.length - hidden];
  return at < 0 || to <= 0 ? [end] : splitAt(end, from, to);
}

const splitAt = (text, from, to) => [text.slice(0, from), el("mark", {}, text.slice(from, to)), text.slice(to)];
