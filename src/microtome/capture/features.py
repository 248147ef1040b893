"""The result of a capture: the outputs, arguments and gradients of calls in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from microtome.addresses import Addresses, not_captured
from microtome.errors import BadQuery, NoMatch
from microtome.files.reading import File
from microtome.inputs import Inputs
from microtome.results.base import render
from microtome.units import plural


class Features(Mapping[str, Any]):
    """The captured values of one run, by path, address, or `path/operator#index`.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> feats = mt.extract(model, x, ["layer1.*", "fc"])
    >>> list(feats), feats["layer1.0"].shape
    (['layer1.0', 'layer1.1', 'fc'], torch.Size([2, 8, 32, 32]))

    Attributes:
        stopped: Whether the run ended after the last selected call.
        never_ran: The selected paths that did not run.
    """

    def __init__(self, *, stopped: bool = False) -> None:
        self.stopped = stopped
        self.never_ran: tuple[str, ...] = ()
        self._values: dict[str, dict[str, Any]] = {}
        self._inputs: dict[str, Inputs] = {}
        self._grads: dict[str, Callable[[], Any]] = {}
        self._output: list[Any] = []  # empty if the run was stopped
        self._other_names: dict[str, str] = {}
        self._module_paths: frozenset[str] = frozenset()  # of the model

    def __getitem__(self, name: str) -> Any:
        """Return the output of the last call of the module at a path, or of the call at an address."""
        return self._by_address[self._resolve(name)]

    def calls(self, path: str) -> list[Any]:
        """Return the outputs of all calls of the module, in order."""
        found = self._index.matches(path)
        if not found:
            raise self._missing_error(path)
        return [self._by_address[address] for address in found]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The captured addresses, grouped by module; with `#0` if the module ran more than once."""
        return tuple(self._index.names)

    def inputs(self, name: str) -> Inputs:
        """Return the arguments of the last call of a module, or of the call at an address, after any edits."""
        if not self._inputs:
            raise BadQuery("arguments were not captured: extract with inputs=True")
        address = self._resolve(name)
        if address not in self._inputs:
            raise BadQuery(f"expected a module, got the operator {name!r}, whose arguments are not captured")
        return self._inputs[address]

    def grad(self, name: str) -> Any:
        """Return the gradients of an output after a backward, in its structure; None for tensors without one."""
        if not self._grads:
            raise BadQuery("gradients were not captured: extract with grad=True")
        return self._grads[self._resolve(name)]()

    @property
    def output(self) -> Any:
        """The output of the model."""
        if not self._output:
            raise BadQuery("the run was stopped before the model returned: extract with stop=False to get its output")
        return self._output[0]

    def plot(
        self,
        name: str,
        *,
        sample: int = 0,
        channels: int = 64,
        grid: tuple[int, int] | None = None,
        scale: Literal["each", "all"] = "each",
        part: int | None = None,
    ) -> Any:
        """Draw an activation for display in a notebook: its channels side by side, larger values lighter.

        (batch, channels, height, width): a map for each channel. (batch, tokens, channels): a map for each channel
        with `grid`, else one map with a row for each token. (batch, channels): one row.

        Args:
            sample: The index in the batch.
            channels: The maximum number of channels, starting from the first.
            grid: The height and width of the image in patches, which are the last tokens.
            scale: `"each"` scales each channel by its own minimum and maximum, `"all"` by common ones.
            part: The index of the tensor, if the module returns several; negative: from the last.
        """
        options = {"sample": sample, "channels": channels, "grid": grid, "scale": scale, "part": part}
        return render("pictures.activation.plot", self[name], name, **options)

    def to_png(self, file: File, name: str, **options: Any) -> str:
        """Write the image that `plot` returns, with its options, and return the path of the file."""
        self.plot(name, **options).save(file)
        return str(file)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the output of that name, or the default."""
        return self[name] if name in self else default  # noqa: SIM401  this is `get`

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._index.matches(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _repr_html_(self) -> str:
        """Render the tensors as a table with pictures for a notebook."""
        html: str = render("captures.features", self)
        return html

    def __repr__(self) -> str:
        some: Sequence[str] = list(self)[:4]
        more = ", …" if len(self) > 4 else ""
        return f"<Features of {plural(len(self), 'module')}: {', '.join(map(repr, some))}{more}>"

    @cached_property
    def _index(self) -> Addresses:
        return Addresses(self._by_address, self._other_names)

    @cached_property
    def _by_address(self) -> dict[str, Any]:
        return {address: value for calls in self._values.values() for address, value in calls.items()}

    def _resolve(self, name: str) -> str:
        """Return the address of a name; for a path, that of the last call."""
        found = self._index.matches(name)
        if not found:
            raise self._missing_error(name)
        return name if name in found and name not in self._values else found[-1]

    def _missing_error(self, name: str) -> NoMatch:
        if name in self.never_ran:
            return NoMatch(f"{name!r} was selected and never ran")
        return not_captured(name, self.addresses, self._module_paths)
