"""Back up the tensors that a run on real tensors writes to."""

from __future__ import annotations

from typing import Any

from microtome.engine.probes import AnyOp, Probe, Where
from microtome.engine.snapshot import WriteBackups
from microtome.engine.torch_internals import DisableTorchFunction
from microtome.trace.op_schema import op_schema


class BackupProbe(Probe):
    """Backs up each tensor before the first write to it, so that weights which nothing writes to are not copied."""

    def __init__(self, backups: WriteBackups) -> None:
        self._backups = backups

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = op_schema(func)
        if schema.may_write:
            with DisableTorchFunction():
                for tensor in schema.written(args, kwargs):
                    self._backups.before_write(tensor)
