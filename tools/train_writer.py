"""Train `zoo:tiny-writer` on the documentation of this project: `python -m tools.train_writer`, about a minute.

The weights depend on the text, which changes with the documentation.
"""

from __future__ import annotations

import re
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from microtome.zoo.writer import CHARACTERS, WEIGHTS, Writer

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "src/**/*.md")
STEPS, BATCH, LENGTH = 1200, 16, 128
#: Learning rates of the matrices of the layers, and of the other parameters.
RATES = (0.03, 0.01)


def prose() -> str:
    """Return the sentences of the documentation: without code, tables and links."""
    pages = sorted({file for pattern in PAGES for file in ROOT.glob(pattern)})
    text = "\n".join(file.read_text() for file in pages)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^[|!].*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[`*]|^#+ ", "", text, flags=re.MULTILINE)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=- )", text))
    kept = "\n".join(part.removeprefix("- ") for part in paragraphs if part)
    return "".join(character for character in kept if character in CHARACTERS)


def batch_of(tokens: Tensor) -> Tensor:
    """Draw pieces of the text, each with the character after it: (batch, length + 1)."""
    starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH, 1))
    return tokens[starts + torch.arange(LENGTH + 1)]


def train(model: Writer, tokens: Tensor) -> None:
    torch.nn.init.normal_(model.tokens.weight, std=0.05)  # also those of the output: small logits at first
    matrices = [parameter for parameter in model.layers.parameters() if parameter.ndim == 2]
    others = [parameter for name, parameter in model.named_parameters() if parameter.ndim == 1 or "layers" not in name]
    optimizers: list[Optimizer] = [
        torch.optim.Muon(matrices, weight_decay=0.02),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        OneCycleLR(optimizer, rate, STEPS, pct_start=0.05, cycle_momentum=False)
        for optimizer, rate in zip(optimizers, RATES, strict=True)
    ]
    start = perf_counter()
    recent = 0.0
    for step in range(STEPS):
        batch = batch_of(tokens)
        logits = model(batch[:, :-1])["logits"]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        recent = loss.item() if not step else 0.95 * recent + 0.05 * loss.item()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {recent:.3f}, {perf_counter() - start:.0f} s", flush=True)  # noqa: T201


def main() -> None:
    torch.manual_seed(0)
    model, text = Writer(), prose()
    print(f"{len(text):,} characters, {sum(p.numel() for p in model.parameters()):,} parameters")  # noqa: T201
    train(model, torch.tensor(model.encode(text)))
    tensors = {name: tensor.detach().half() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, WEIGHTS)
    WEIGHTS.chmod(0o644)
    prompt = torch.tensor([model.encode("The model ")])
    print(model.decode(model.eval().generate(prompt, 200)[0].tolist()))  # noqa: T201


if __name__ == "__main__":
    main()
