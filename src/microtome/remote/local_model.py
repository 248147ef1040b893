"""A model on the side of the client: its head for any cut, and its tail where the edge can finish by itself."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from microtome import __version__
from microtome.errors import BadQuery, RemoteError
from microtome.remote import protocol
from microtome.remote.connection import Connection
from microtome.remote.payloads import INPUTS
from microtome.split.splitter import Splitter
from microtome.split.stage import Stage
from microtome.split.structure_spec import ModelSpec


class LocalModel:
    """The model here: its head and, where its weights are here, its tail, for any cut."""

    def __init__(self, model: nn.Module | Stage, inputs: Any) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, tuple[Stage, Stage | None]] = {}
        self.splitter: Splitter | None = None
        if isinstance(model, Stage):
            if model.begins_at is not None or model.ends_at is None:
                raise BadQuery(f"a client runs the first stage of a model, and this is {model!r}")
            self.model, self.fingerprint = model.model, model.fingerprint
            self.spec: ModelSpec = model.spec
            self._made[model.ends_at] = model, None
            self.fixed: str | None = model.ends_at
        else:
            with torch.no_grad():
                self.splitter = Splitter(model, inputs)
            self.model, self.fingerprint = model, self.splitter.fingerprint
            self.spec = self.splitter.spec
            self.fixed = None
        self.is_whole = not any(tensor.is_meta for tensor in (*self.model.parameters(), *self.model.buffers()))

    @property
    def device(self) -> torch.device | None:
        first = next((one for one in self.model.parameters() if not one.is_meta), None)
        return None if first is None else first.device

    def at(self, at: str) -> tuple[Stage, Stage | None]:
        """Head and tail for a cut."""
        with self._lock, torch.no_grad():
            if at not in self._made:
                if self.splitter is None:
                    raise BadQuery(f"only the stage up to {self.fixed!r} is here: the model cannot be cut at {at!r}")
                head, tail = self.splitter.at(at)
                self._made[at] = head, tail if self.is_whole else None
            return self._made[at]

    def address(self, at: Any) -> str:
        """The cut that a user named."""
        if at == INPUTS:
            return INPUTS
        if self.splitter is None:
            assert self.fixed is not None
            return self.fixed if at in ("auto", self.fixed) else self.at(str(at))[0].ends_at or ""
        found = self.splitter.cut(at)
        return found.at


def shake_hands(connection: Connection, parts: LocalModel, timeout: float, *, any_torch: bool) -> Any:
    """Call `Hello`, and return the reply if the server has the same model and protocol."""
    hello = protocol.HelloRequest(
        protocol=protocol.PROTOCOL, microtome=__version__, torch=torch.__version__, fingerprint=parts.fingerprint
    )
    told = connection.ask("Hello", hello, timeout)
    here, there = type(parts.model).__name__, f"{told.model} at {connection.address}"
    if told.protocol != protocol.PROTOCOL:
        raise RemoteError(
            f"{connection.address} speaks version {told.protocol} of the protocol (microtome {told.microtome}), and "
            f"this is version {protocol.PROTOCOL} (microtome {__version__})",
            "REFUSED",
        )
    if told.fingerprint != parts.fingerprint:
        ours, theirs = parts.fingerprint.split("-"), told.fingerprint.split("-")
        what = "weights" if ours[0] == theirs[0] else "structure"
        raise RemoteError(
            f"the {what} of {here} here and of {there} are not the same: the fingerprints are {parts.fingerprint} and "
            f"{told.fingerprint}. Load the same model with the same weights on both sides",
            "WRONG_MODEL",
        )
    if _release(told.torch) != _release(torch.__version__) and not any_torch:
        raise RemoteError(
            f"here is torch {torch.__version__}, and at {connection.address} torch {told.torch}: results may differ in "
            "the last bits. Install the same, or allow it with any_torch=True",
            "REFUSED",
        )
    connection.max_part = told.max_part or None
    return told


def _release(version: str) -> str:
    return version.partition("+")[0]
