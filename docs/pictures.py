"""Generate the pictures of the documentation and the README: `make pictures`.

`python -m docs.pictures gallery` generates one group of them: attention, tables, page or gallery.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.text import Text

import microtome as mt
from demo.__main__ import draw_attention, scene
from microtome import zoo
from microtome.cli import main as microtome
from microtome.report.cuts import CutSelection
from microtome.report.formats import describe
from microtome.report.row_selection import RowSelection
from microtome.report.top import report as top_report

FOLDER = Path(__file__).parent / "pictures"
WIDTH = 112
#: The shape of Llama 2 70B, in bfloat16.
LLAMA = (
    "--arg \"architectures=['LlamaForCausalLM']\" --arg dtype=bfloat16 --arg hidden_size=8192"
    " --arg num_hidden_layers=80 --arg num_attention_heads=64 --arg num_key_value_heads=8 --arg intermediate_size=28672"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")  # without it, pages are not drawn


def main(groups: Sequence[str]) -> None:
    """Draw these groups of pictures, by default all."""
    drawers: dict[str, Callable[[], None]] = {
        "attention": lambda: draw_attention(str(FOLDER / "attention.png")),
        "tables": draw_tables,
        "page": draw_page,
        "gallery": draw_gallery,
    }
    if unknown := set(groups) - set(drawers):
        sys.exit(f"expected groups among {', '.join(drawers)}, got {', '.join(sorted(unknown))}")
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # times of one thread differ less from run to run
    os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")  # rich caches the codes of colors it wrote first
    for group in groups or drawers:
        drawers[group]()


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
    words = "microtome plan … --bandwidth 10Gbps --rtt 1ms --objective throughput"
    terminal("plan", words, describe(plan))


def terminal(name: str, words: str, shown: RenderableType, width: int = WIDTH) -> None:
    """Draw the output of a command, without external fonts."""
    with tempfile.TemporaryFile("w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True)
        console.print(shown)
    svg = console.export_svg(title=f"$ {words}", unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    lines = (line.rstrip() for line in svg.splitlines())
    (FOLDER / f"{name}.svg").write_text("\n".join(line for line in lines if line) + "\n")


def draw_page() -> None:
    """Take screenshots of the page of a model."""
    if CHROMIUM is None:
        return
    resolved = zoo.resolve("torchvision:resnet18")
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        profile = mt.profile(resolved.model, resolved.inputs, measure="time", repeat=15)
        file = Path(folder) / "report.html"
        profile.to_html(file, cuts=mt.cuts(resolved.model, resolved.inputs))
        with browse(file, width=1200, height=1330) as page:
            page.screenshot(path=FOLDER / "page.png")
            for name in ("explorer", "memory"):
                box = page.locator(f"[id='section:{name}']").bounding_box()
                page.screenshot(path=FOLDER / f"page-{name}.png", full_page=True, clip=box)
    for picture in FOLDER.glob("page*.png"):
        _make_smaller(picture)


@contextmanager
def browse(file: Path, *, width: int, height: int) -> Iterator[Any]:
    """Open a page in Chromium, and yield it as Playwright's `Page`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(file.absolute().as_uri())
        yield page
        browser.close()


def _make_smaller(file: Path) -> None:
    """Quantize to 256 colors, which suffice for charts and text."""
    from PIL import Image

    with Image.open(file) as picture:
        picture.convert("RGB").quantize(256).save(file, optimize=True)


def draw_gallery() -> None:
    """Draw the pictures of gallery.md by its own commands."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        run("profile timm:vit_small_patch16_224 --time --html vit.html")
        shoot_section("vit", "tree", zoom="blocks.5")
        run("profile torchvision:mobilenet_v2 --input 32x3x224x224 --html memory.html")
        shoot_section("memory", "memory")
        run("profile torchvision:mobilenet_v2 --time --html roofline.html")
        shoot_section("roofline", "roofline")
        run("profile torchvision:resnet50 --time --json edge.json")
        run("profile torchvision:resnet50 --time --json cloud.json")
        link = "--bandwidth 20Mbps --rtt 15ms --objective throughput --codec int8"
        draw_command("cut", "plan torchvision:resnet50", "--edge edge.json --cloud cloud.json", link)
        run("profile timm:resnet18 --time --json before.json")
        run("profile timm:resnet18 --arg replace_stem_pool=True --time --json after.json")
        draw_command("diff", "diff before.json after.json", width=90)
        columns = "--columns params,param_bytes,macs,share,peak_bytes"
        draw_command("llama", "profile hf:llama --meta", LLAMA, f"--input input_ids=1x2048:int64 {columns}")
        draw_command("track", "track zoo:tiny-unet", width=90)
    draw_head()


def draw_command(name: str, start: str, middle: str = "", end: str = "", *, width: int = WIDTH) -> None:
    """Run a command, and draw its output; the title omits the middle of a long command."""
    title = f"microtome {start} … {end}" if middle else f"microtome {start}"
    shown = Text.from_ansi(run(f"{start} {middle} {end}", width))
    terminal(f"gallery-{name}", title, shown, width)


def run(words: str, width: int = WIDTH) -> str:
    """Run a command of microtome, and return what it prints on a terminal of this width."""
    os.environ["COLUMNS"] = str(width)
    with redirect_stdout(_Terminal()) as printed:
        microtome(shlex.split(words), standalone_mode=False)
    return printed.getvalue()


class _Terminal(io.StringIO):
    """A stream that is written to as a terminal is, with colors."""

    def isatty(self) -> bool:
        return True


def shoot_section(name: str, section: str, *, zoom: str | None = None) -> None:
    """Take a screenshot of one section of `name`.html, with its details opened and its tree zoomed."""
    if CHROMIUM is None:
        return
    file = FOLDER / f"gallery-{name}.png"
    with browse(Path(f"{name}.html"), width=1000, height=1000) as page:
        shown = page.locator(f"[id='section:{section}']")
        shown.evaluate("section => section.style.padding = '16px'")
        for details in shown.locator("details").all():
            details.evaluate("details => details.open = true")
        if zoom:
            shown.locator(f"[aria-label^='{zoom},']").press("Enter")
        shown.screenshot(path=file)
    _make_smaller(file)


def draw_head() -> None:
    """Draw the attention of one head over an image; the weights are random."""
    model, image = zoo.resolve("timm:vit_small_patch16_224").model, scene(224)
    mt.attention(model, image[None], rows="cls").to_png(FOLDER / "gallery-head.png", image, head=3)


if __name__ == "__main__":
    main(sys.argv[1:])
