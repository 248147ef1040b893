"""What was captured in one run of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from microtome.engine.select import no_path
from microtome.errors import BadQuery, NoMatch
from microtome.inputs import Inputs


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

    def __getitem__(self, name: str) -> Any:
        """The output of the last call of the module at a path, or of the call at an address."""
        address = self._address(name)
        return self._values[_path_of(name)][address]

    def calls(self, path: str) -> list[Any]:
        """The outputs of all calls of the module, in their order."""
        self._address(path)
        return list(self._values[_path_of(path)].values())

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all that was captured, those of a module one after the other."""
        return tuple(address for calls in self._values.values() for address in calls)

    def inputs(self, name: str) -> Inputs:
        """The arguments of the last call of the module at a path, or of the call at an address, as `edit` left them."""
        if not self._inputs:
            raise BadQuery("arguments were not captured: extract with inputs=True")
        address = self._address(name)
        if address not in self._inputs:
            raise BadQuery(f"{name!r} is an operator: its arguments are not captured")
        return self._inputs[address]

    def grad(self, name: str) -> Any:
        """The gradients of what was captured, after a backward: the same structure; None where none came."""
        if not self._grads:
            raise BadQuery("gradients were not captured: extract with grad=True")
        return self._grads[self._address(name)]()

    @property
    def output(self) -> Any:
        """What the model returned."""
        if not self._output:
            raise BadQuery("the model did not run to its end: extract with stop=False to have its output")
        return self._output[0]

    def get(self, name: str, default: Any = None) -> Any:
        """What is there under that name, or the default."""
        return self[name] if name in self else default  # noqa: SIM401  this is `get`

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and bool(self._address(name))
        except NoMatch:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        some: Sequence[str] = list(self)[:4]
        more = ", …" if len(self) > 4 else ""
        return f"<Features of {len(self)} modules: {', '.join(some)}{more}>"

    def _address(self, name: str) -> str:
        """The address of what is meant: of a path, the last call."""
        calls = self._values.get(_path_of(name), {})
        if name in self._values:
            return next(reversed(calls))
        if name in calls:
            return name
        if name.endswith("#0") and name[:-2] in calls:
            return name[:-2]
        if "/" in name and (of_call := [address for address in calls if address.startswith(f"{name}#")]):
            return of_call[-1]
        if name in self.never_ran:
            raise NoMatch(f"{name!r} never ran in this look")
        raise no_path(name, self.addresses)


def _path_of(name: str) -> str:
    """The path of an address; of an operator, that and its name without indices."""
    path, slash, operator = name.partition("/")
    return path.partition("#")[0] + slash + operator.partition("#")[0]
