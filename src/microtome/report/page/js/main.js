// What is in the page without a script stays where a view fails.
document.documentElement.classList.add("js");
icicle(viewOf("tree"));
layerTable(document.getElementById("grid"));
lazily(viewOf("memory"), memoryView);
lazily(viewOf("roofline"), rooflineView);
lazily(viewOf("explorer"), explorerView);
lazily(viewOf("compare"), compareView);
document.documentElement.dataset.ready = "1";
