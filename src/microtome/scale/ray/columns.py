"""The columns of a data set that are the inputs of a model, and the ids of rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from microtome.capture.store.rows import RowId
from microtome.errors import BadInputs, BadQuery, NoMatch
from microtome.inputs import Inputs
from microtome.units import some

#: Rows as arrays, by the name of the column.
Batch = dict[str, np.ndarray[Any, Any]]
#: A column; several, for positional arguments; arguments with their columns; or a function of a batch.
InputColumns = str | list[str] | tuple[str, ...] | Mapping[str, str] | Callable[[Batch], Any]


@dataclass(frozen=True)
class Columns:
    """The columns of inputs and of ids.

    Attributes:
        id: The column of ids; None: the id of a row is its position.
    """

    inputs: InputColumns
    id: str | None = None

    def __post_init__(self) -> None:
        """Check the types; `find` checks that the columns exist."""
        if isinstance(self.inputs, str) or callable(self.inputs):
            return
        is_several = isinstance(self.inputs, list | tuple | Mapping)
        if not is_several or not self.inputs or not all(isinstance(name, str) for name in self.names):
            raise BadQuery(
                "expected inputs= as the name of a column, a list of names, a dict of arguments and names, or a "
                f"function of a batch, got {self.inputs!r:.80}"
            )

    @classmethod
    def find(cls, dataset: Any, inputs: InputColumns | None, id: str | None) -> Columns:  # noqa: A002
        """Check that a data set has the columns; by default, the only one without ids is the input."""
        names = dataset.columns()
        if not names:
            raise BadInputs("expected a data set with rows, got an empty one")
        if inputs is None:
            others = [name for name in names if name != id]
            if len(others) != 1:
                raise BadQuery(f"expected the columns of the model's inputs as `inputs`: there are {some(names, 20)}")
            inputs = others[0]
        columns = cls(inputs, id)
        for name in (*columns.names, *([] if id is None else [id])):
            if name not in names:
                raise NoMatch(f"the data set has no column {name!r}: expected one of {some(list(names), 20)}")
        return columns

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of inputs; none if a function makes them from all columns."""
        if isinstance(self.inputs, str):
            return (self.inputs,)
        if isinstance(self.inputs, Mapping):
            return tuple(self.inputs.values())
        return () if callable(self.inputs) else tuple(self.inputs)

    @property
    def needed(self) -> list[str] | None:
        """The columns to read; None: all."""
        return None if callable(self.inputs) else list(dict.fromkeys((*self.names, *([self.id] if self.id else []))))

    def inputs_of(self, batch: Batch, device: torch.device | str | None = None) -> Inputs:
        """Return the arguments of the model for a batch."""
        if isinstance(self.inputs, str):
            inputs = Inputs(_to_tensor(self.inputs, batch))
        elif isinstance(self.inputs, Mapping):
            inputs = Inputs(**{name: _to_tensor(column, batch) for name, column in self.inputs.items()})
        elif callable(self.inputs):
            inputs = Inputs.of(self.inputs(batch))
        else:
            inputs = Inputs(*(_to_tensor(column, batch) for column in self.inputs))
        return inputs if device is None else inputs.to(device)

    def ids_of(self, batch: Batch) -> tuple[RowId, ...] | None:
        """Return the ids of the rows; None if these are their positions."""
        if self.id is None:
            return None
        ids = batch[self.id].tolist()
        if wrong := [one for one in ids if not isinstance(one, int | float | str)]:
            raise BadInputs(f"expected numbers or strings as ids in {self.id!r}, got {wrong[0]!r:.80}")
        return tuple(ids)


def _to_tensor(column: str, batch: Batch) -> Tensor:
    """Return a tensor of its own, since arrays of Ray are read-only."""
    values = batch[column]
    try:
        return torch.from_numpy(np.array(values))
    except TypeError as error:
        raise BadInputs(
            f"column {column!r} is not a tensor: its dtype is {values.dtype}, or its rows differ in shape; pass a "
            "function of a batch as `inputs`, which returns the inputs of the model"
        ) from error


def keep_columns(names: Collection[str], columns: Columns) -> list[str]:
    """Return the columns beside the features: that of the ids, or all that are no inputs."""
    return [columns.id] if columns.id is not None else [name for name in names if name not in columns.names]
