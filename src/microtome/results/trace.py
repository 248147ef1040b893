"""One run as data: its calls, its operators, and the values they produce and read.

Classes with thousands of instances are named tuples, which are created several times faster than frozen dataclasses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from microtome.addresses import find_address
from microtome.files.reading import File
from microtome.results.base import render, write
from microtome.units import plural

Phase = Literal["forward", "recompute", "backward"]
#: `meta`: shapes alone. `fake`: shapes, and the devices the tensors would be on. `real`: as it is, with copied buffers.
TensorMode = Literal["meta", "fake", "real"]


class Value(NamedTuple):
    """A tensor of the run: a storage in one shape. All tensor objects of that shape on it are one value.

    Attributes:
        origin: `"input"`, `"parameter"`, `"buffer"`; `"op"` if an operator produced it; `"constant"` for a tensor that
            the model keeps elsewhere.
        name: The name of a parameter or buffer; for an input, of the parameter of `forward`: `x`, `mask`.
        device: The device that it is on, or would be on in a real run.
        nbytes: Elements times their size, even if they overlap in memory.
        producer: The operator that produced it.
        consumers: The operators that read it.
        mutated_by: The operators that wrote to it in place.
        alias_of: The first value in the same storage, if that is another.
        memory: The index of its storage in `Trace.memories`.
        content: A digest of the elements of a constant, if it was requested and they are known; else None.
    """

    index: int  # type: ignore[assignment]
    origin: Literal["input", "parameter", "buffer", "constant", "op"]
    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    nbytes: int
    producer: int | None
    consumers: tuple[int, ...]
    mutated_by: tuple[int, ...]
    alias_of: int | None
    memory: int
    content: str | None = None


class Memory(NamedTuple):
    """A storage.

    Attributes:
        begins: The number of operators that had run when it was first observed.
        ends: The number that had run when the last tensor on it was freed; None if it outlived the run.
    """

    nbytes: int
    begins: int
    ends: int | None


class Op(NamedTuple):
    """One run of one operator.

    Attributes:
        name: The name in torch: `aten.addmm.default`. A composite function that is one kernel on some devices is one
            operator: `aten.scaled_dot_product_attention`, `aten.lstm`; so is its backward.
        call: The index of the call whose code ran it, or whose backward it is part of; or None.
        read_bytes: The bytes of the values it reads, each once. A view reads and writes nothing.
        write_bytes: The bytes of its outputs and of values changed in place.
        macs: Multiply-accumulates; None where no formula is known for the operator.
        flops: Twice the multiply-accumulates, and all other operations; None likewise.
        madds: Multiplications and additions apart, and all other operations; None likewise.
    """

    index: int  # type: ignore[assignment]
    name: str
    call: int | None
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[int, ...]
    read_bytes: int
    write_bytes: int
    macs: int | None
    flops: int | None
    madds: int | None


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One run of one module.

    Attributes:
        address: The path of the module, with the index of the call where the module ran several times: `relu#0`.
        ops: The operators that its own code ran, without those of calls inside it; with those of its backward.
        inputs: The tensors in its arguments.
        outputs: The tensors in its return value.
        begins: The number of operators that had run when it began.
        ends: The number that had run when it ended.
    """

    index: int
    address: str
    path: str
    type: str
    phase: Phase
    parent: int | None
    children: tuple[int, ...]
    depth: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple[int, ...]
    begins: int
    ends: int


@dataclass(frozen=True, slots=True)
class How:
    """The kind of tensors of a run, and the reason why it was not a cheaper kind."""

    tensor_mode: TensorMode
    why: str

    def __str__(self) -> str:
        return f"{self.tensor_mode} ({self.why})" if self.why else self.tensor_mode


class Read(NamedTuple):
    """A read of the values of a tensor by Python code, without an operator.

    Attributes:
        op: The operator that ran next.
        call: The call whose code reads it; None outside any.
        value: The value that is read.
    """

    op: int
    call: int | None
    value: int


@dataclass(frozen=True)
class Trace:
    """One run of a model. Operators, calls and values refer to each other by index.

    Attributes:
        calls: In the order they began; the root is first.
        ops: In the order they ran.
        values: In the order they were first observed.
        reads: Reads of values by Python code without an operator, as by `tolist`.
        aliases: Further paths of modules, such as those of shared ones, each with the path in addresses.
    """

    how: How
    calls: tuple[TracedCall, ...]
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    memories: tuple[Memory, ...]
    reads: tuple[Read, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, address: str) -> TracedCall:
        """Return the call at an address. `#0` may be left out where the module ran once."""
        calls = {call.address: call for call in self.calls if call.phase == "forward"}
        return calls[find_address(address, calls, self.aliases)]

    def below(self, call: TracedCall) -> Iterator[TracedCall]:
        """Yield the call and all calls inside it."""
        yield call
        for child in call.children:
            yield from self.below(self.calls[child])

    def to_dot(self, file: File | None = None, *, depth: int | None = None, cut: Any = None) -> str:
        """Export the dataflow between calls for Graphviz, to the file or as text.

        Args:
            depth: Expand the calls above this depth; None: as deep as there is room for.
            cut: The cut to draw, an address or a `Cut`, which also knows what crosses; the calls that contain it are
                expanded as far as needed.
        """
        return write(render("graph.drawing.draw_dot", self, depth, cut), file)

    def to_svg(self, file: File | None = None, *, depth: int | None = None, cut: Any = None) -> str:
        """Export the same as an SVG picture, to the file or as text."""
        return write(render("graph.drawing.draw_svg", self, depth, cut), file)

    def _repr_html_(self) -> str:
        """Render the calls as HTML for a notebook."""
        html: str = render("notebook.trace", self)
        return html

    def __repr__(self) -> str:
        counts = {"call": self.calls, "op": self.ops, "value": self.values}
        sizes = ", ".join(plural(len(items), noun) for noun, items in counts.items())
        return f"<Trace of {sizes}, {self.how.tensor_mode}>"
