"""The face of `torch.utils.module_tracker`: change the import, keep the code."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from microtome.track import Tracker, track


class ModuleTracker:
    """Which modules run now, as a set of names: the root's class name and the attribute path, and always `"Global"`.

    Unlike torch's, it is exact for keyword arguments, for inputs that need no gradient, in `autograd.grad`, after an
    exception and with threads; and `FlopCounterMode` can use it:

    >>> import torch
    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> counter = FlopCounterMode(display=False)
    >>> counter.mod_tracker = ModuleTracker()
    >>> with counter:
    ...     _ = torch.nn.Linear(2, 3)(input=torch.ones(4, 2))
    >>> sum(counter.get_flop_counts()["Linear"].values())
    48
    """

    def __init__(self) -> None:
        self._tracker: Tracker = track()

    def __enter__(self) -> Self:
        self._tracker.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._tracker.__exit__(kind, error, trace)

    @property
    def parents(self) -> set[str]:
        """The names of the modules whose forward or backward runs now in this thread, and `"Global"`."""
        return {"Global", *(_torch_name(call.path) for call in self._tracker.stack)}

    @property
    def is_bw(self) -> bool:
        """Whether a backward runs now in this thread."""
        return self._tracker.is_backward


def _torch_name(path: str) -> str:
    """Torch gives two roots of one class the same name, where the tracker says `Net` and `Net@2`."""
    root, dot, rest = path.partition(".")
    return root.partition("@")[0] + dot + rest
