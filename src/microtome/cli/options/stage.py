"""The part of a model that one side runs: all of it, or one stage that `microtome split` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from torch import nn

from microtome.cli.options.model import resolve
from microtome.errors import BadInputs, MicrotomeError, describe_error
from microtome.inputs import Inputs
from microtome.split.checkpoint import load_stage
from microtome.split.stage import Stage


def part_of(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    weights: str | None = None,
    stages: str | None = None,
    index: int = 0,
    device: str | None = None,
) -> tuple[nn.Module | Stage, Inputs]:
    """The model, or the stage of a folder, on its device; and an example of its inputs there."""
    if weights is not None and stages is not None:
        raise click.UsageError("choose one of --weights and --stages")
    if device is not None and device.partition(":")[0] == "meta":
        raise BadInputs("--device meta has no values: nothing can be computed on it")
    given: list[Inputs] = []

    def make() -> nn.Module:
        found = resolve(model, inputs, args, weights=weights)
        given.append(found.inputs)
        return found.model.eval()

    if stages is not None:
        with _on(device):
            return load_stage(make, stages, index, device=device), _moved(given, device)
    whole = make()
    with _on(device):
        return whole if device is None else whole.to(device), _moved(given, device)


def _moved(given: list[Inputs], device: str | None) -> Inputs:
    return given[-1] if device is None else given[-1].to(device)


@contextmanager
def _on(device: str | None) -> Iterator[None]:
    """Say of an error that the device is its reason."""
    try:
        yield
    except MicrotomeError:
        raise
    except Exception as error:
        if device is None:
            raise
        raise BadInputs(f"--device {device}: {describe_error(error)}") from error
