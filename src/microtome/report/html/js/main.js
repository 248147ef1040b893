// Build each view by itself: one that fails shows its error and does not affect the others.
function attempt(view, build) {
  try {
    build(view);
    view.querySelectorAll(".scroll").forEach(sideways);
  } catch (error) {
    console.error(error);
    view.append(el("p", { class: "reason" }, `– This could not be drawn: ${error.message}`));
  }
}

document.documentElement.classList.add("js");
document.querySelectorAll(".scroll").forEach(sideways);
attempt(viewOf("tree"), icicle);
attempt(document.getElementById("grid"), layerTable);
// Every chart is built at once, so that a capture of the whole page and a print have them, seen or not.
for (const [name, build] of Object.entries({ memory: memoryView, roofline: rooflineView, explorer: explorerView, compare: compareView })) {
  if (viewOf(name) !== null) attempt(viewOf(name), build);
}
document.documentElement.dataset.ready = "1";
