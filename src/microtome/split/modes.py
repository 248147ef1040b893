"""The modes of a model's modules, training or eval."""

from __future__ import annotations

from torch import nn

from microtome.engine.selectors import named_modules
from microtome.errors import Unsupported


class ModuleModes:
    """The modes that the modules of a model were in when it was split."""

    def __init__(self, model: nn.Module) -> None:
        self._paths, self._modules = zip(*named_modules(model), strict=True)
        self._training = [module.training for module in self._modules]

    def check(self) -> None:
        """Raise if a module is in the other mode now.

        Raises:
            Unsupported: The cuts, and what crosses them, are those of a run in the modes of then.
        """
        now = [module.training for module in self._modules]
        if now == self._training:
            return
        path, was = next(
            (path, was) for path, was, is_now in zip(self._paths, self._training, now, strict=True) if was != is_now
        )
        expected, got, call = ("training", "eval", "train") if was else ("eval", "training", "eval")
        where = repr(path) if path else "the model"
        raise Unsupported(
            f"expected {where} in {expected} mode, as when it was split, got {got} mode: call {call}() on it, or split "
            "it again"
        )
