"""The model on the side of the client: its head for any cut and, if all weights are here, its tail."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from microtome import __version__
from microtome.addresses import INPUT
from microtome.errors import BadQuery, RemoteError
from microtome.inputs import no_inputs_error
from microtome.remote import protocol
from microtome.remote.connection import Connection
from microtome.remote.payloads import INPUTS
from microtome.results.plan import Plan
from microtome.split.splitter import Splitter
from microtome.split.stage import Stage
from microtome.split.variants import StageVariants
from microtome.units import count


class LocalModel:
    """A model, or the first stage of one.

    Attributes:
        splitter: Cuts the model anywhere; None for a stage.
        is_whole: Whether all weights are here, so that this device can compute the output alone.
    """

    def __init__(self, model: nn.Module | Stage, inputs: Any) -> None:
        self._lock = threading.Lock()
        self._stages: dict[str, tuple[Stage, Stage | None]] = {}
        self._variants: dict[str, StageVariants] = {}
        self.splitter: Splitter | None = None
        source: Stage | Splitter
        if isinstance(model, Stage):
            if model.begins_at is not None or model.ends_at is None:
                raise BadQuery(f"expected the first stage of a model for a client, got {model!r}")
            source = model
            self._stages[model.ends_at] = model, None
            if model.variants is not None:
                self._variants[model.ends_at] = model.variants
        else:
            if inputs is None:
                raise no_inputs_error(model)
            with torch.no_grad():
                source = self.splitter = Splitter(model, inputs)
        self.model, self.fingerprint, self.spec = source.model, source.fingerprint, source.spec
        self.is_whole = not any(tensor.is_meta for tensor in (*self.model.parameters(), *self.model.buffers()))

    @property
    def device(self) -> torch.device | None:
        return next((parameter.device for parameter in self.model.parameters() if not parameter.is_meta), None)

    @property
    def params(self) -> int:
        """The number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def stages_at(self, at: str) -> tuple[Stage, Stage | None]:
        """Return head and tail for a cut; the tail is None if its weights are not here."""
        with self._lock, torch.no_grad():
            if at not in self._stages:
                if self.splitter is None:
                    (only,) = self._stages
                    raise BadQuery(f"only the stage up to {only!r} is here: the model cannot be cut at {at!r}")
                stages = self.splitter.at(at)
                self._stages[at] = stages[0], stages[1] if self.is_whole else None
                self._variants[at] = stages.variants
            return self._stages[at]

    def variants_at(self, at: str) -> StageVariants:
        """Return the stages of a cut for the steps of sessions."""
        self.stages_at(at)
        return self._variants[at]

    def resolve_cut(self, at: Any) -> str:
        """Return the address of a cut that a user named; of a stage, its only one for `"auto"`.

        A plan that runs the whole model on another device sends the inputs.
        """
        if isinstance(at, Plan):
            at = _planned_cut(at)
        if isinstance(at, str) and at in (INPUTS, INPUT):
            return INPUTS
        if self.splitter is not None:
            return self.splitter.cut(at).at
        (only,) = self._stages
        return only if at == "auto" else self.stages_at(str(at))[0].ends_at or ""


def _planned_cut(plan: Plan) -> Any:
    """Return the cut of a plan; raise if it has none since this device runs the model alone."""
    if plan.at is not None:
        return plan.at
    here = next(iter(plan.devices))
    if plan.sole_device != here:
        return INPUTS
    cuts = (candidate.at[0] for candidate in plan if candidate.refused is None and candidate.at)
    best = next((at for at in cuts if at is not None), None)
    other = "" if best is None else f", or connect with at={best!r}, the best of its cuts"
    raise BadQuery(f"the plan runs the whole model on {here}, without a server: call the model{other}")


def handshake(connection: Connection, local: LocalModel, timeout: float, *, any_torch: bool) -> Any:
    """Call `Hello`, and return the reply if the server has the same model, protocol and torch."""
    hello = protocol.HelloRequest(
        protocol=protocol.PROTOCOL, microtome=__version__, torch=torch.__version__, fingerprint=local.fingerprint
    )
    reply = connection.call("Hello", hello, timeout)
    if reply.protocol != protocol.PROTOCOL:
        raise RemoteError(
            f"{connection.address} speaks version {reply.protocol} of the protocol (microtome {reply.microtome}), and "
            f"this is version {protocol.PROTOCOL} (microtome {__version__})",
            "REFUSED",
        )
    if reply.fingerprint != local.fingerprint:
        here, there = type(local.model).__name__, reply.model
        (structure, values), (their_structure, their_values) = (
            fingerprint.partition("-")[::2] for fingerprint in (local.fingerprint, reply.fingerprint)
        )
        has_same_structure = structure == their_structure
        advice = "Load the same model with the same weights on both sides"
        if values == their_values != "unknown":  # of meta tensors
            advice = "The weights are equal: pass the same example inputs (--input) and run the same code on both sides"
        if not has_same_structure and reply.params:  # 0 from a server of an older microtome
            here += f" with {count(local.params)} parameters"
            there += f" with {count(reply.params)} parameters"
        raise RemoteError(
            f"the {'weights' if has_same_structure else 'structure'} of {here} here and of {there} at "
            f"{connection.address} differ: the fingerprints are {local.fingerprint} and "
            f"{reply.fingerprint}. {advice}",
            "WRONG_MODEL",
        )
    if _release(reply.torch) != _release(torch.__version__) and not any_torch:
        raise RemoteError(
            f"torch is {torch.__version__} here and {reply.torch} at {connection.address}: results may differ in the "
            "last bits. Install the same version, or allow it with any_torch=True",
            "REFUSED",
        )
    connection.max_part = reply.max_part or None
    return reply


def _release(version: str) -> str:
    return version.partition("+")[0]
