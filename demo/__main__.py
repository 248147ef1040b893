"""`make demo`: every feature of microtome on built-in models, in less than a minute."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap

import torch
from rich.console import Console

import microtome as mt
from microtome import zoo
from microtome.cli import main as microtome
from microtome.zoo.writer import KVCache

RESNET, VIT, WRITER = "zoo:tiny-resnet", "zoo:tiny-vit", "zoo:tiny-writer"
INPUT = "8x3x64x64"  # larger than the built-in example, so that there is something to measure
CUTS = ("stem", "layer1.0.conv1", "layer2", "pool")
console = Console(highlight=False)


def main(folder: Path) -> int:
    """Run the demo; return 1 if a server's output differs from the model's."""
    folder.mkdir(parents=True, exist_ok=True)
    report, picture, profile = (str(folder / name) for name in ("report.html", "attention.png", "profile.json"))
    larger = ("--input", INPUT)

    title("Profile: the cost of each layer, without running the model")
    command("profile", RESNET)
    command("profile", VIT, "--depth", "2", "--backward")

    title("Track: the order of calls, forward and backward")
    command("track", RESNET)

    title("Capture: the attention of the class token in a vision transformer")
    draw_attention(picture)

    title("Measure: the time of each layer, also as an HTML page")
    files = ("--json", profile, "--html", report)
    command("profile", RESNET, *larger, "--time", "--repeat", "10", *files)

    title("Cut: every cut of the model, and the best one for a pipeline of two machines")
    command("cuts", RESNET, *larger, "--all")
    link = ("--bandwidth", "10Gbps", "--rtt", "1ms", "--objective", "throughput")
    command("plan", RESNET, *larger, "--edge", profile, "--cloud", profile, *link)

    title("Serve: the head in this process, the tail in a server")
    if not is_server_exact():
        console.print("The server's output differs from the model's.", style="bold red")
        return 1

    title("Generate: text from a language model, whose KV cache is in two processes")
    generate_over_server()
    console.print(f"\nOpen {report} in a browser, and {picture}.", style="bold", soft_wrap=True)
    return 0


def title(text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}", align="left")


def command(*words: str) -> None:
    """Run one of microtome's commands, as a shell would."""
    lines = wrap(
        f"$ microtome {shlex.join(words)}",
        console.width - 2,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    console.print(" \\\n".join(lines), style="bold cyan", soft_wrap=True)
    microtome(words, standalone_mode=False)


def draw_attention(file: str) -> None:
    """Draw the attention of each head of the last layer over an image; the weights are untrained."""
    resolved = zoo.resolve(VIT, inputs="1x3x128x128", args={"size": 128, "patch": 8})
    image = scene(128)
    attention = mt.attention(resolved.model, image[None])
    attention.to_png(file, image, head="all")
    console.print(f"{file}: each head of {attention.layers[-1]}, over the image", soft_wrap=True)


def scene(size: int) -> torch.Tensor:
    """A sun over the sea, (3, size, size), from 0 to 1."""
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    sky = torch.stack([0.4 + 0.5 * y, 0.5 + 0.3 * y, 0.9 - 0.3 * y])
    sea = torch.stack([0.1 * x, 0.3 + 0.1 * (40 * y).sin(), 0.5 + 0.2 * (40 * y).sin()])
    sun = ((x - 0.65) ** 2 + (y - 0.35) ** 2).sqrt() < 0.15
    image = torch.where(y < 0.6, sky, sea)
    return torch.where(sun, torch.tensor([1.0, 0.85, 0.3]).view(3, 1, 1), image)


def is_server_exact() -> bool:
    """Return whether a server in another process and the model agree bit for bit, for several cuts."""
    model, x = zoo.build("tiny-resnet")
    with torch.no_grad(), serving(RESNET) as address:
        expected = model(x)
        for cut in CUTS:
            with mt.connect(model, x, address, at=cut) as remote:
                is_equal = torch.equal(remote(x), expected)
                sent = remote.requests[-1]
            outcome = "bit-equal" if is_equal else "DIFFERENT"
            console.print(f"cut at {cut:15}{sent.sent_bytes:8,} bytes to the {sent.where}: {outcome}")
            if not is_equal or sent.where != "cloud":
                return False
    return True


def generate_over_server() -> None:
    """Continue a text with a server in another process, and print which of them has the cache of each layer."""
    with serving(WRITER) as address:
        command(
            "generate", WRITER, "--prompt", "Each stage ", "--tokens", "60", "--at", "layers.1", "--server", address
        )
        model, example = zoo.build("tiny-writer")
        with mt.connect(model, example, address, at="layers.1") as remote, remote.session() as session:
            cache = session(input_ids=torch.zeros(1, 8, dtype=torch.int64), cache=KVCache())["cache"]
    for index, keys in enumerate(cache.keys):
        where = "here" if type(keys) is torch.Tensor else "on the server"
        console.print(f"cache of layers.{index}: {where}")


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Start a server, yield its address, and stop it at the end of the block."""
    words = ["serve", model, "--listen", "127.0.0.1:0"]
    console.print(f"$ microtome {' '.join(words)} &", style="bold cyan")
    server = subprocess.Popen(
        [sys.executable, "-c", "from microtome.cli import main; main()", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"is served at (\S+),", line)
        if found is None:
            raise RuntimeError(f"the server did not start: {line!r}")
        console.print(line.strip())
        yield found[1]
    finally:
        server.terminate()
        try:
            server.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.communicate()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo")))
