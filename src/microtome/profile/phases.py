"""Profile the two phases of a language model: the prefill, and the run for one more token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import nn

from microtome.engine.meta_run import substitute_tensors
from microtome.engine.pytree import as_state, base_class, is_plain_class
from microtome.errors import BadQuery
from microtome.inputs import Inputs
from microtome.results.phases import Phases
from microtome.results.profile import Profile
from microtome.trace.phases import PHASES, OutputProbe, Prompt, state_bytes


class ProfileRun(Protocol):
    """Profiles one run, which the probe observes."""

    def __call__(self, run: Inputs, probe: OutputProbe, /, *, measured: bool = True) -> Profile: ...


def profile_phases(
    model: nn.Module, inputs: Any, phases: Collection[str], profile_run: ProfileRun, *, needs_values: bool
) -> Phases:
    """Profile the named phases.

    Args:
        needs_values: Whether runs are measured: the cache of the prompt then has values.
    """
    names = check_phases(phases)
    prompt = Prompt.of(model, inputs)
    probe = OutputProbe()
    prefill = profile_run(prompt.inputs, probe, measured="prefill" in names)
    output = _run(model, prompt.inputs) if needs_values and "decode" in names else probe.output
    states = prompt.states_in(output)
    cache_bytes = state_bytes(states)
    state_types: list[Any] = [type(state) for state in states.values()]
    classes = tuple(base_class(cls) for cls in state_types if is_plain_class(cls))
    decode = token_bytes = None
    if "decode" in names:
        with as_state(classes):  # the inputs are the tokens, as those of cuts
            decode = profile_run(prompt.next_token(output), after := OutputProbe())
        token_bytes = (state_bytes(prompt.states_in(after.output)) - cache_bytes) // prompt.batch
    return Phases(
        model=type(model).__name__,
        batch=prompt.batch,
        prompt_tokens=prompt.length,
        prefill=prefill if "prefill" in names else None,
        decode=decode,
        state=tuple(states),
        cache_bytes=cache_bytes,
        token_cache_bytes=token_bytes,
        logits_to_keep=prompt.logits_to_keep,
    )


def check_phases(phases: Collection[str]) -> tuple[str, ...]:
    """Return the names of phases; raise if one is unknown, or if there is none."""
    names = (phases,) if isinstance(phases, str) else tuple(phases)
    unknown = [name for name in names if name not in PHASES]
    if unknown or not names:
        raise BadQuery(f"expected phases of {', '.join(map(repr, PHASES))}, got {unknown[0] if unknown else phases!r}")
    return names


def _run(model: nn.Module, inputs: Inputs) -> Any:
    """Run the model on real tensors, and return its output; the model is as before."""
    with substitute_tensors(model, inputs, "real") as run, torch.no_grad():
        return run.run(model)
