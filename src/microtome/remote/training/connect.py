"""Connect to a server that trains: `mt.connect(…, train=True)`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from microtome.engine.fingerprint import modes_fingerprint
from microtome.errors import BadQuery, RemoteError
from microtome.files.reading import File
from microtome.inputs import no_inputs_error
from microtome.remote.autotune import LOSSLESS, fastest_codec
from microtome.remote.connection import Connection
from microtome.remote.handshake import handshake
from microtome.remote.security import Security
from microtome.remote.training.checkpoints import Checkpoints
from microtome.remote.training.client import RemoteTraining
from microtome.remote.training.trained_stage import OptimizerOrFactory, TrainedStage
from microtome.split.splitter import Splitter
from microtome.split.stage import Stage


class TrainingConnection(NamedTuple):
    """Options of `connect` with `train=True`."""

    optimizer: OptimizerOrFactory | None
    checkpoint: File | None
    codec: str
    any_torch: bool
    max_reply: int | None
    timeout_s: float


class _Identity(NamedTuple):
    name: str
    params: int
    fingerprint: str


def connect_training(
    model: nn.Module | Any, inputs: Any, server: str, at: Any, security: Security, options: TrainingConnection
) -> RemoteTraining:
    """Split a model for training, and attach to the server that has the same one."""
    if not isinstance(model, nn.Module) or isinstance(model, Stage):
        raise BadQuery(f"expected the whole model with train=True, got {model!r:.200}")
    if inputs is None:
        raise no_inputs_error(model)
    if isinstance(at, str) and at in ("auto", "", "(input)"):
        raise BadQuery(f"expected a cut at a layer with train=True, such as at='layer1', got {at!r}")
    if options.codec not in ("auto", *LOSSLESS):
        raise BadQuery(
            f"expected a lossless codec with train=True, {', '.join(LOSSLESS)}, got {options.codec!r}: gradients would "
            "not be those of the model"
        )
    splitter = Splitter(model, inputs, grad=True)
    identity = _Identity(type(model).__name__, sum(one.numel() for one in model.parameters()), splitter.fingerprint)
    cut = splitter.cut(at)
    stages = splitter.at(cut)
    checkpoints = None if options.checkpoint is None else Checkpoints(options.checkpoint)
    side = TrainedStage(stages[0], options.optimizer, checkpoints)
    modes = modes_fingerprint(splitter.model)
    connection = Connection(server, security)
    try:
        hello = handshake(connection, identity, options.timeout_s, any_torch=options.any_torch, modes=modes)
        if cut.at not in hello.cuts:
            raise RemoteError(f"{server} does not serve the cut at {cut.at!r}", "NO_CUT")
        codec = options.codec
        if codec == "auto":
            codecs = [name for name in LOSSLESS if name in hello.codecs]
            codec = fastest_codec(splitter, cut.at, connection, codecs)
        return RemoteTraining(side, connection, cut.at, codec, options.timeout_s, options.max_reply)
    except BaseException:
        connection.close()
        raise
