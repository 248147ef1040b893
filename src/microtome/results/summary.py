"""A summary of a model that has not run: its modules, and the sizes of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from microtome.addresses import find_address
from microtome.results.base import Result, render
from microtome.units import count, plural, size


@dataclass(frozen=True, slots=True, repr=False)
class ModuleRow:
    """A module, with all modules inside it.

    Attributes:
        path: The path in `named_modules()`; "" for the model itself.
        params: Parameters; a shared one counts where it is first found.
        shared_params: Parameters that are found here and count elsewhere.
    """

    path: str
    type: str
    depth: int
    params: int
    trainable_params: int
    param_bytes: int
    buffer_bytes: int
    shared_params: int = 0

    def __repr__(self) -> str:
        return f"<{self.path or '(root)'}: {self.type}, {count(self.params)} params, {size(self.param_bytes)}>"


@dataclass(frozen=True)
class ModelSummary(Result, kind="summary"):
    """The tree of a model's modules, with parameters and sizes, known without a run.

    Attributes:
        model: The type of the model.
        modules: In the order of `named_modules()`, the model itself first.
    """

    model: str
    modules: tuple[ModuleRow, ...]

    @property
    def total(self) -> ModuleRow:
        """The whole model."""
        return self.modules[0]

    def __getitem__(self, path: str) -> ModuleRow:
        """Return the row of the module at a path."""
        rows = {row.path: row for row in self.modules}
        return rows[find_address(path, rows)]

    def __iter__(self) -> Iterator[ModuleRow]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def show(
        self,
        *,
        depth: int | None = None,
        sort: str | None = None,
        top: int | None = None,
        columns: Iterable[str] = (),
    ) -> None:
        """Print the table; in a notebook, display it.

        Args:
            depth: Show the tree down to this depth; by default as deep as there is room for.
            sort: Order by this column, the largest first.
            top: Show only the first rows.
            columns: Show these columns, such as `["type", "params"]`.
        """
        render("formats.show", self, "summary.ModuleSelection", depth=depth, sort=sort, top=top, columns=columns)

    def check(self) -> None:
        if not self.modules:
            raise ValueError("it has no modules")

    def __repr__(self) -> str:
        return (
            f"<ModelSummary of {self.model}, {plural(len(self.modules), 'module')}, {count(self.total.params)} params>"
        )
