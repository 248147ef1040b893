"""What was captured in one run of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from microtome.addresses import Addresses, no_path
from microtome.errors import BadQuery, NoMatch
from microtome.files.reading import File
from microtome.inputs import Inputs
from microtome.results.rendering import render


class Features(Mapping[str, Any]):
    """The values of one run, by path, address, or `path/operator#index`.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> feats = mt.extract(model, x, ["layer1.*", "fc"])
    >>> list(feats), feats["layer1.0"].shape
    (['layer1.0', 'layer1.1', 'fc'], torch.Size([2, 8, 32, 32]))

    Attributes:
        stopped: Whether the run was ended when all was there.
        never_ran: The paths that were selected and did not run.
    """

    def __init__(self, *, stopped: bool = False) -> None:
        self.stopped = stopped
        self.never_ran: tuple[str, ...] = ()
        self._values: dict[str, dict[str, Any]] = {}
        self._inputs: dict[str, Inputs] = {}
        self._grads: dict[str, Callable[[], Any]] = {}
        self._output: list[Any] = []  # none, or one
        self._others: dict[str, str] = {}

    def __getitem__(self, name: str) -> Any:
        """The output of the last call of the module at a path, or of the call at an address."""
        return self._by_address[self._one(name)]

    def calls(self, path: str) -> list[Any]:
        """The outputs of all calls of the module, in their order."""
        found = self._there.find(path)
        if not found:
            raise self._missing(path)
        return [self._by_address[address] for address in found]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all that was captured, those of a module together; with `#0` where it ran again."""
        return tuple(self._there.spelled)

    def inputs(self, name: str) -> Inputs:
        """The arguments of the last call of the module at a path, or of the call at an address, as `edit` left them."""
        if not self._inputs:
            raise BadQuery("arguments were not captured: extract with inputs=True")
        address = self._one(name)
        if address not in self._inputs:
            raise BadQuery(f"{name!r} is an operator: its arguments are not captured")
        return self._inputs[address]

    def grad(self, name: str) -> Any:
        """The gradients of what was captured, after a backward: the same structure; None where none came."""
        if not self._grads:
            raise BadQuery("gradients were not captured: extract with grad=True")
        return self._grads[self._one(name)]()

    @property
    def output(self) -> Any:
        """What the model returned."""
        if not self._output:
            raise BadQuery("the model did not run to its end: extract with stop=False to have its output")
        return self._output[0]

    def plot(self, name: str, **options: Any) -> Any:
        """A picture that notebooks show: what `to_png` writes, with its options."""
        return render("activation.plot", self[name], name, **options)

    def to_png(
        self,
        file: File,
        name: str,
        *,
        sample: int = 0,
        channels: int = 64,
        grid: tuple[int, int] | None = None,
        scale: Literal["each", "all"] = "each",
        part: int | None = None,
    ) -> None:
        """Write an activation as a picture: its channels side by side, the larger a value the lighter.

        Of images (batch, channels, height, width), a map for each channel. Of tokens (batch, tokens, channels), a map
        for each channel with `grid`, else one with a line for each token. Of (batch, channels), one line.

        Args:
            sample: Which of the batch.
            channels: How many channels at most, the first.
            grid: How many patches the image is high and wide; the last tokens are those.
            scale: Whether each channel is scaled by itself from its least to its greatest value, or all together.
            part: Which of the tensors, where the module gives several.
        """
        self.plot(name, sample=sample, channels=channels, grid=grid, scale=scale, part=part).save(file)

    def get(self, name: str, default: Any = None) -> Any:
        """What is there under that name, or the default."""
        return self[name] if name in self else default  # noqa: SIM401  this is `get`

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._there.find(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        some: Sequence[str] = list(self)[:4]
        more = ", …" if len(self) > 4 else ""
        count = f"{len(self)} module{'' if len(self) == 1 else 's'}"
        return f"<Features of {count}: {', '.join(map(repr, some))}{more}>"

    @cached_property
    def _there(self) -> Addresses:
        """What was captured, once it is."""
        return Addresses(self._by_address, self._others)

    @cached_property
    def _by_address(self) -> dict[str, Any]:
        return {address: value for calls in self._values.values() for address, value in calls.items()}

    def _one(self, name: str) -> str:
        """The address that a name means: of a path, that of the last call."""
        found = self._there.find(name)
        if not found:
            raise self._missing(name)
        return name if name in found and name not in self._values else found[-1]

    def _missing(self, name: str) -> NoMatch:
        if name in self.never_ran:
            return NoMatch(f"{name!r} never ran in this look")
        return no_path(name, self.addresses)
