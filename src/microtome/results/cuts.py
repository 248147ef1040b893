"""The cuts of a model, and the values that cross them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, get_args, overload

from microtome.addresses import OUTPUT, expand_root, find_address, number_calls
from microtome.errors import BadQuery, NoMatch
from microtome.results.base import Result, render
from microtome.units import size


class Live(NamedTuple):
    """A value that crosses a cut.

    Attributes:
        name: The address of the call that returned it, with an index if that returned several: `layer1`, `lstm[0]`; for
            an input of the model, the parameter of `forward`: `x`, `mask`.
        source: The address of the call; None: it is an input of the model.
        nbytes: Its bytes, uncompressed.
    """

    name: str
    source: str | None
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Cut:
    """A place to cut: the exit of a call. The head runs up to it, the tail after it.

    Attributes:
        at: The address of the call, with its index where the module ran several times: `relu#0`.
        live: The values that the tail needs from the head.
        nbytes: Their bytes.
        head_macs: Multiply-accumulates of the head; None where an operator's are not known.
        head_params: Parameters that the head reads. One that both sides read counts on both.
        dominates: Whether every cut before it has more bytes.
        refused: The reason why the model cannot be cut here exactly; None: it can.
        grad_refused: The reason why gradients cannot cross it, so that it is no cut for training; None: none is known
            beside a cache.
        head_state_bytes: Bytes of a language model's cache that stay in the head after the run; None: it has none.
    """

    index: int
    at: str
    type: str
    depth: int
    live: tuple[Live, ...]
    nbytes: int
    head_macs: int | None
    tail_macs: int | None
    head_params: int
    tail_params: int
    head_param_bytes: int
    tail_param_bytes: int
    dominates: bool = False
    refused: str | None = None
    grad_refused: str | None = None
    head_state_bytes: int | None = None
    tail_state_bytes: int | None = None

    def __repr__(self) -> str:
        return f"<Cut at {self.at!r}, {'refused' if self.refused else size(self.nbytes)}>"


class SharedWeight(NamedTuple):
    """A parameter that is read at several points of the run, such as an embedding that is also the output layer.

    Attributes:
        read_before: For each of these points, the index of the first cut after it; that after all cuts is their number.
    """

    nbytes: int
    read_before: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenCuts:
    """The cuts of the run of a language model for the token after a prompt; the fields are those of `Cuts`."""

    inputs: tuple[Live, ...]
    outputs: tuple[Live, ...]
    cuts: tuple[Cut, ...]
    how: str
    calls: int | None
    flops: int | None


By = Literal["bytes", "head_macs", "tail_macs", "head_params", "tail_params"]


@dataclass(frozen=True)
class Cuts(Result, Sequence[Cut], kind="cuts"):
    """Every place a model can be cut, in the order in which the calls end; and where it cannot, with the reason.

    Attributes:
        model: The class of the model.
        name: The name of the model on the command line; None if it was run from Python.
        inputs: The input tensors of the model.
        outputs: Its output tensors.
        offered: The cuts, which are the items of the sequence.
        refused: The places where the model cannot be cut exactly.
        how: The kind of tensors of the run.
        calls: The number of calls of the run; None in files of an older microtome.
        params: The parameters of the model, read or not, each once; None in files of an older microtome.
        param_bytes: Their bytes.
        flops: FLOPs of the run; None where an operator's are not known, and in files of an older microtome.
        aliases: Further paths of modules, such as those of shared ones, each with the path in addresses.
        token: Of a language model whose inputs are a prompt: the cuts of the run for the next token.
        prompt_tokens: The tokens of each prompt.
        no_decode: The reason why the next token of a model with a cache is not priced; None: it is.
        shared_weights: The parameters that are read before and after a cut; empty in files of an older microtome.
    """

    model: str
    inputs: tuple[Live, ...]
    outputs: tuple[Live, ...]
    offered: tuple[Cut, ...]
    refused: tuple[Cut, ...]
    how: str
    calls: int | None = None
    params: int | None = None
    param_bytes: int | None = None
    flops: int | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    name: str | None = None
    token: TokenCuts | None = None
    prompt_tokens: int | None = None
    no_decode: str | None = None
    shared_weights: tuple[SharedWeight, ...] = ()

    @property
    def title(self) -> str:
        """The name of the model, or else its class."""
        return self.name or self.model

    @property
    def input_bytes(self) -> int:
        return sum(value.nbytes for value in self.inputs)

    @property
    def output_bytes(self) -> int:
        return sum(value.nbytes for value in self.outputs)

    def __len__(self) -> int:
        return len(self.offered)

    def __iter__(self) -> Iterator[Cut]:
        return iter(self.offered)

    @overload
    def __getitem__(self, at: int | str) -> Cut: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Cut, ...]: ...
    def __getitem__(self, at: int | str | slice) -> Cut | tuple[Cut, ...]:
        """Return the cut at an address or index."""
        if not isinstance(at, str):
            return self.offered[at]
        cut = self.find(at)
        if cut.refused is not None:
            raise NoMatch(f"the {self.model} cannot be cut at {at!r}: {cut.refused}")
        return cut

    @cached_property
    def decode(self) -> Cuts | None:
        """The cuts of the run for the token after the prompt; None: the model is not a language model with a cache."""
        step = self.token
        if step is None:
            return None
        offered, refused = (
            tuple(cut for cut in step.cuts if (cut.refused is None) == is_cut) for is_cut in (True, False)
        )
        return replace(
            self,
            inputs=step.inputs,
            outputs=step.outputs,
            offered=offered,
            refused=refused,
            how=step.how,
            calls=step.calls,
            flops=step.flops,
            token=None,
            shared_weights=(),  # by the cuts of the other run
        )

    def token_bytes(self, at: str) -> int | None:
        """Return the bytes that cross a cut for each token after the prompt; None: it is no cut there."""
        step = None if self.decode is None else self.decode._by_address.get(at)
        return None if step is None or step.refused is not None else step.nbytes

    def find(self, at: str) -> Cut:
        """Return the place at an address, whether the model can be cut there or not."""
        if isinstance(at, str) and (at == OUTPUT or expand_root(at) in ("", "#0")):
            raise NoMatch("the exit of the model itself is no cut: nothing would be left for the tail")
        return self._by_address[find_address(at, self._by_address, self.aliases)]

    @cached_property
    def _by_address(self) -> dict[str, Cut]:
        return {cut.at: cut for cut in sorted((*self.offered, *self.refused), key=lambda cut: cut.index)}

    def best(self, by: By = "bytes") -> Cut:
        """Return the first cut with the least of a quantity."""
        if by not in get_args(By):
            raise BadQuery(f"expected to compare cuts by {', '.join(get_args(By))}, got {by!r}")
        name = "nbytes" if by == "bytes" else by
        known = [cut for cut in self.offered if getattr(cut, name) is not None]
        if not known:
            raise BadQuery(f"the {self.model} has no cut whose {by} are known")
        return min(known, key=lambda cut: (getattr(cut, name), cut.index))

    def show(
        self,
        *,
        depth: int | None = None,
        sort: By | None = None,
        top: int | None = None,
        columns: Iterable[str] = (),
    ) -> None:
        """Print the table; in a notebook, display it.

        Args:
            depth: Show the cuts at calls down to this depth; by default as deep as there is room for.
            sort: Order by this quantity, the least first.
            top: Show only the first rows.
            columns: Show these columns, such as `["bytes", "head_macs", "crosses"]`.
        """
        render("formats.show", self, "cuts.CutSelection", depth=depth, sort=sort, top=top, columns=columns)

    def table(self) -> str:
        """Return all cuts as a table."""
        return str(self)

    def as_dict(self) -> dict[str, Any]:
        data = super().as_dict()
        return data | {"cuts": [*data.pop("offered"), *data.pop("refused")]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        places = _upgrade_addresses(data["cuts"])
        offered = [cut for cut in places if cut["refused"] is None]
        refused = [cut for cut in places if cut["refused"] is not None]
        return super().from_dict(data | {"offered": offered, "refused": refused})

    def __repr__(self) -> str:
        refused = f", {len(self.refused)} refused" if self.refused else ""
        return f"<Cuts of {self.model}: {len(self.offered)}{refused}>"


def _upgrade_addresses(cuts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `#0` to the first of several calls, which older files leave out."""
    addresses = [cut["at"] for cut in cuts]
    known = dict(zip(addresses, number_calls(addresses), strict=True))

    def upgrade(live: dict[str, Any]) -> dict[str, Any]:
        source = live["source"]
        if known.get(source, source) == source:
            return live
        return {**live, "source": known[source], "name": known[source] + live["name"].removeprefix(source)}

    return [{**cut, "at": known[cut["at"]], "live": [upgrade(live) for live in cut["live"]]} for cut in cuts]
