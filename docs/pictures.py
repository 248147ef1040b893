"""Generate the pictures of the documentation and the README: `make pictures`."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

import microtome as mt
from demo.__main__ import draw_attention
from microtome import zoo
from microtome.report.cuts import CutSelection
from microtome.report.formats import describe
from microtome.report.plan import CandidateSelection
from microtome.report.row_selection import RowSelection
from microtome.report.table import Report
from microtome.report.top import report as top_report

FOLDER = Path(__file__).parent / "pictures"
WIDTH = 112


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # times of one thread differ less from run to run
    draw_attention(str(FOLDER / "attention.png"))
    draw_tables()
    draw_page()


def draw_tables() -> None:
    """Draw the output of commands, and the graph."""
    model, x = zoo.build("tiny-resnet")
    with torch.no_grad():
        name = "zoo:tiny-resnet"  # as commands set it
        counted, cuts = replace(mt.profile(model, x), name=name), replace(mt.cuts(model, x), name=name)
        timed = mt.profile(model, "8x3x64x64", measure="time", repeat=20)
        mt.trace(model, x).to_svg(FOLDER / "graph.svg", depth=1, cut=cuts["layer1.0.conv1"])
    terminal("profile", "microtome profile zoo:tiny-resnet --depth 2", describe(counted, RowSelection(depth=2)))
    terminal("top", "microtome top zoo:tiny-resnet -n 3", top_report(counted, 3))
    terminal("cuts", "microtome cuts zoo:tiny-resnet", describe(cuts, CutSelection(depth=2)))
    link = mt.Link("10Gbps", rtt="1ms")
    plan = mt.plan(
        replace(mt.cuts(model, "8x3x64x64"), name=name), edge=timed, cloud=timed, link=link, objective="throughput"
    )
    words = "microtome plan … --bandwidth 10Gbps --rtt 1ms --objective throughput --top 4"
    terminal("plan", words, describe(plan, CandidateSelection(top=4)))


def terminal(name: str, words: str, shown: Report) -> None:
    """Draw the output of a command, without external fonts."""
    with tempfile.TemporaryFile("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(shown)
    svg = console.export_svg(title=f"$ {words}", unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    lines = (line.rstrip() for line in svg.splitlines())
    (FOLDER / f"{name}.svg").write_text("\n".join(line for line in lines if line) + "\n")


def draw_page() -> None:
    """Take screenshots of the page in Chromium, if it is installed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        return
    resolved = zoo.resolve("torchvision:resnet18")
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        profile = mt.profile(resolved.model, resolved.inputs, measure="time", repeat=15)
        file = Path(folder) / "report.html"
        profile.to_html(file, cuts=mt.cuts(resolved.model, resolved.inputs))
        _shoot(chromium, file)


def _shoot(chromium: str, file: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 1330})
        page.goto(file.as_uri())
        page.screenshot(path=FOLDER / "page.png")
        for name in ("explorer", "memory"):
            box = page.locator(f"[id='section:{name}']").bounding_box()
            page.screenshot(path=FOLDER / f"page-{name}.png", full_page=True, clip=box)
        browser.close()
    for picture in FOLDER.glob("page*.png"):
        _make_smaller(picture)


def _make_smaller(file: Path) -> None:
    """Quantize to 256 colors, which suffice for charts and text."""
    from PIL import Image

    with Image.open(file) as picture:
        picture.convert("RGB").quantize(256).save(file, optimize=True)


if __name__ == "__main__":
    main()
