"""The handshake with a server: the same protocol, model and torch on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from microtome import __version__
from microtome.errors import RemoteError
from microtome.remote import protocol
from microtome.remote.connection import Connection
from microtome.units import count


class ModelIdentity(Protocol):
    """A model of this side: the name of its class, its number of parameters, its structure and weights."""

    @property
    def name(self) -> str: ...
    @property
    def params(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...


def handshake(
    connection: Connection,
    model: ModelIdentity,
    timeout: float,
    *,
    any_torch: bool,
    modes: str | None = None,
    accept: Callable[[Any], None] | None = None,
) -> Any:
    """Call `Hello`, and return the reply if the server has the same model, protocol and torch.

    The connection keeps the reply, too.

    Args:
        modes: The `modes_fingerprint` that a server which trains must have, too; None: it must be one that does not.
        accept: Raises RemoteError if the reply is not acceptable for another reason.
    """
    request = protocol.HelloRequest(
        protocol=protocol.PROTOCOL, microtome=__version__, torch=torch.__version__, fingerprint=model.fingerprint
    )
    reply = connection.call("Hello", request, timeout)
    if reply.protocol != protocol.PROTOCOL:
        raise RemoteError(
            f"{connection.address} speaks version {reply.protocol} of the protocol (microtome {reply.microtome}), and "
            f"this is version {protocol.PROTOCOL} (microtome {__version__})",
            "REFUSED",
        )
    if reply.fingerprint != model.fingerprint:
        raise RemoteError(_describe_difference(connection, model, reply), "WRONG_MODEL")
    if _release(reply.torch) != _release(torch.__version__) and not any_torch:
        raise RemoteError(
            f"torch is {torch.__version__} here and {reply.torch} at {connection.address}: results may differ in the "
            "last bits. Install the same version, or allow it with any_torch=True",
            "REFUSED",
        )
    _check_training(connection.address, reply, modes)
    if accept is not None:
        accept(reply)
    connection.max_part = reply.max_part or None
    connection.hello = reply
    return reply


def _check_training(address: str, reply: Any, modes: str | None) -> None:
    """Raise unless the server trains the model in these modes; None: unless it does not train it."""
    trains = modes is not None
    if reply.trains is not trains:
        advice = "start it with optimizer=" if trains else "connect with train=True"
        does = "does not train the model" if trains else "trains the model, and answers no other requests"
        raise RemoteError(f"{address} {does}: {advice}", "REFUSED")
    if modes is not None and reply.modes != modes:
        here, there = (one.partition("-")[0] for one in (modes, reply.modes))
        others = "" if here != there else " others,"
        raise RemoteError(
            f"expected the same modules in training mode on both sides, got {here} here and{others} {there} at "
            f"{address}: call model.train(), or model.eval(), on both before mt.serve and mt.connect",
            "REFUSED",
        )


def _describe_difference(connection: Connection, model: ModelIdentity, reply: Any) -> str:
    here, there = model.name, reply.model
    (structure, values), (their_structure, their_values) = (
        one.partition("-")[::2] for one in (model.fingerprint, reply.fingerprint)
    )
    has_same_structure = structure == their_structure
    advice = "Load the same model with the same weights on both sides"
    if values == their_values != "unknown":  # of meta tensors
        advice = (
            "The weights are equal: pass the same example inputs (--input) and run the same code on both sides, in the "
            "same mode, eval or training"
        )
    if not has_same_structure and reply.params:  # 0 from a server of an older microtome
        here += f" with {count(model.params)} parameters"
        there += f" with {count(reply.params)} parameters"
    return (
        f"the {'weights' if has_same_structure else 'structure'} of {here} here and of {there} at "
        f"{connection.address} differ: the fingerprints are {model.fingerprint} and {reply.fingerprint}. {advice}"
    )


def _release(version: str) -> str:
    return version.partition("+")[0]
