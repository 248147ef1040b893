"""A part of a model that runs by itself."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine import Call, Probe, Session, Skip, Stop, Stopped
from microtome.engine.select import named
from microtome.engine.structure import map_tensors, tensors_in
from microtome.errors import BadBoundary, BadInputs, MicrotomeError, Unsupported, said
from microtome.inputs import Inputs
from microtome.split.boundary import Boundary
from microtome.split.ghost import Ghost, GhostRead, awake
from microtome.split.liveness import Place
from microtome.split.templates import Template, check_same, lists_in, take_apart
from microtome.split.trail import Follower, Sent, Step, Trail
from microtome.split.weights import tensor_at


class Stage:
    """A part of a split model: from a cut, or the beginning, to the next cut, or the end.

    The first stage is called as the model is and gives a `Boundary`; the others take one. The last gives what the model
    gives. Nothing of the other parts runs.

    Attributes:
        index: Which of the stages it is.
        model: The model that it is a part of.
        fingerprint: Of the model; stages of another one refuse its boundaries.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        begins: Trail | None,
        ends: Trail | None,
        inputs: Template,
        needed: Iterable[str],
        fingerprint: str,
    ) -> None:
        self.model = model
        self.index = index
        self.fingerprint = fingerprint
        self._begins = begins
        self._ends = ends
        self._inputs = inputs
        self._needed = tuple(needed)
        self._free: list[tuple[Session, _Run]] = []
        modules = dict(named(model))
        self._seen = [modules[path] for trail in (begins, ends) if trail is not None for path in trail.paths]
        self._skipped = (
            [] if begins is None else list({step.path: modules[step.path] for step in begins.steps}.values())
        )
        around = [] if begins is None else ["", *(onward for _, onward in begins.levels if onward is not None)]
        self._around = [modules[path] for path in around]
        self._cut = None if ends is None else modules[ends.levels[-1][0][-1].path]

    @property
    def begins_at(self) -> str | None:
        """The address of the cut that it goes on from; None: it is the first."""
        return None if self._begins is None else self._begins.at

    @property
    def ends_at(self) -> str | None:
        """The address of the cut where it ends; None: it is the last."""
        return None if self._ends is None else self._ends.at

    def parameters_needed(self) -> list[str]:
        """The names of the parameters and buffers that it reads."""
        return list(self._needed)

    @property
    def device(self) -> torch.device | None:
        """Where it computes: where the first of its weights lies, or of the model's if it reads none; None: unknown."""
        own = (tensor_at(self.model, name) for name in self._needed)
        for tensor in chain(own, self.model.parameters(), self.model.buffers()):
            if tensor is not None and not tensor.is_meta:
                return tensor.device
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def run(self, *args: Any, probes: Iterable[Probe] = (), **kwargs: Any) -> Any:
        """Run the part; the probes look on."""
        boundary = None
        if self._begins is not None:
            boundary = self._boundary(args, kwargs)
        # A session takes longer to make than to open, so it is kept; several threads may run the stage at once.
        probes = tuple(probes)
        session, run = self._free.pop() if self._free and not probes else self._session(probes)
        run.begin(boundary)
        had = [(module, dict(module.__dict__)) for module in self._around]
        try:
            given = Inputs(*args, **kwargs) if boundary is None else run.inputs(boundary)
            if boundary is None:
                got = take_apart((given.args, given.kwargs))[0]
                check_same("what the head is given, positional and by name,", self._inputs, got)
            run.take_inputs(given)
            with session:
                return self._run(run, given)
        finally:
            run.begin(None)  # it holds nothing between runs
            for module, attributes in had:
                _put_back(module, attributes)
            if not probes:
                self._free.append((session, run))

    def _run(self, run: _Run, given: Inputs) -> Any:
        try:
            output = given.run(self.model)
        except Stopped as stopped:
            if self._ends is None or not run.is_over(stopped.call):
                raise
            return run.boundary()
        except (RuntimeError, NotImplementedError) as error:
            missing = self._missing()
            if missing and not isinstance(error, MicrotomeError):
                raise Unsupported(
                    f"stage {self.index} cannot run here: {len(missing)} of its weights are not loaded, such as "
                    f"{missing[0]!r}. Load them with mt.load_stage(…, {self.index}), or split without `load`"
                ) from error
            raise
        if self._ends is not None:
            raise Unsupported(
                f"the model ended before the cut at {self._ends.at!r}: its way depends on what it is given"
            )
        return run.finished(output)

    def _session(self, probes: tuple[Probe, ...] = ()) -> tuple[Session, _Run]:
        run = _Run(self)
        interventions: list[Any] = []
        if self._skipped:
            interventions.append(Skip(self._skipped, run.output, when=run.is_skipped))
        if self._cut is not None:
            interventions.append(Stop(self._cut, when=run.is_over))
        # In one session with the run, or the probes would not see the exit of the call at which it stops.
        at = None if probes else self._seen
        return Session(self.model, [run, *probes], interventions, at=at, fast_paths=True), run

    def _missing(self) -> list[str]:
        held = {name: tensor_at(self.model, name) for name in self._needed}
        return [name for name, tensor in held.items() if tensor is None or tensor.is_meta]

    def _boundary(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Boundary:
        assert self._begins is not None
        if len(args) != 1 or kwargs or not isinstance(args[0], Boundary):
            raise BadInputs(f"stage {self.index} takes what the stage before it gives: one Boundary")
        boundary = args[0]
        if boundary.at != self._begins.at:
            raise BadBoundary(
                f"the boundary is of a cut at {boundary.at!r}, and this stage goes on at {self._begins.at!r}"
            )
        if boundary.fingerprint != self.fingerprint:
            raise BadBoundary(
                f"the boundary is of another model: its fingerprint is {boundary.fingerprint}, and this stage's is "
                f"{self.fingerprint}. Split the same model, with the same weights, on both sides"
            )
        return boundary

    def __repr__(self) -> str:
        start = "the inputs" if self._begins is None else repr(self._begins.at)
        end = "the output" if self._ends is None else repr(self._ends.at)
        return f"<Stage {self.index} of {type(self.model).__name__}, from {start} to {end}>"


class _Run(Probe):
    """One run of a stage: leaves out what lies before it, and takes what crosses after it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.begin(None)

    def begin(self, boundary: Boundary | None) -> None:
        """Forget the run before."""
        stage = self._stage
        self._thread = get_ident()
        self._device = None if boundary is None else stage.device
        self._replay = None if stage._begins is None else Follower(stage._begins)
        self._bank = None if stage._ends is None else Follower(stage._ends)
        self._received = boundary
        self._given: dict[str, Tensor] = {}
        self._entries = iter(()) if boundary is None else iter(_listed(boundary, stage._begins))
        self._skip: tuple[Call, Step] | None = None
        self._open: dict[Call, Step] = {}
        self._had: dict[Call, tuple[list[Tensor], list[Any]]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._calls: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}

    # -- what the session asks -----------------------------------------------------------------------------------------

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase != "forward" or get_ident() != self._thread:
            return
        self._skip = None
        if self._replay is not None and (step := self._replay.enter(call)) is not None:
            self._skip = call, step
        if self._bank is not None and (step := self._bank.enter(call)) is not None:
            self._open[call] = step
            if step.changes:
                self._had[call] = list(tensors_in((args, kwargs))), lists_in((args, tuple(kwargs.values())))

    def is_skipped(self, call: Call) -> bool:
        return self._skip is not None and self._skip[0] is call and get_ident() == self._thread

    def output(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call that is left out gives: what was sent of it, and ghosts for the rest."""
        assert self._skip is not None
        assert self._replay is not None
        step = self._skip[1]
        entry = next(self._entries)
        arguments = list(tensors_in((args, kwargs))) if step.uses_arguments else []
        for at, item in entry["a"].items():
            _revive(arguments[int(at)], self._tensor(item, step.address, Place(step.call, int(at), is_argument=True)))
        tensors: list[Tensor] = []
        for at, (item, same) in enumerate(zip(entry["t"], step.same, strict=True)):
            place = Place(step.call, at)
            if at in step.views:
                tensors.append(_view(arguments[step.views[at]], item, step))
            elif same is None:
                tensors.append(self._tensor(item, step.address, place))
            elif item is not None:
                tensors.append(_revive(arguments[same], self._tensor(item, step.address, place)))
            else:  # what it holds is right, or nobody reads it before it is written again
                tensors.append(arguments[same])
        if step.changes:
            self._refill(step, entry["c"], lists_in((args, tuple(kwargs.values()))), tensors, arguments)
        self._replay.exit(call, step)
        output = step.output.fill(tensors, entry["p"], (args, kwargs))
        if call.module is not None and call.module._forward_hooks:
            _run_hooks(call.module, args, kwargs, output)
        return output

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._bank is None or (step := self._open.pop(call, None)) is None:
            return
        template, tensors, plain = take_apart(output, (args, kwargs))
        check_same(f"what {step.address!r} returns", step.output, template)
        if step.changes:  # those that it was given, whatever they hold now
            arguments, lists = self._had.pop(call)
        else:
            arguments, lists = list(tensors_in((args, kwargs))) if step.uses_arguments else [], []
        self._calls.append(
            {
                "t": [self._item(step, at, tensor, arguments) for at, tensor in enumerate(tensors)],
                "p": plain,
                "a": {str(at): self._send(sent, arguments[at]) for at, sent in step.arguments.items()},
                **({"c": [_contents(step, lists[at], tensors, arguments) for at in step.changes]} if lists else {}),
            }
        )
        self._bank.exit(call, step)

    def is_over(self, call: Call) -> bool:
        return self._bank is not None and self._bank.is_there and get_ident() == self._thread

    # -- what crosses to the next --------------------------------------------------------------------------------------

    def take_inputs(self, given: Inputs) -> None:
        """Keep what the next stage needs of the model's arguments."""
        if self._stage._ends is None:
            return
        _, tensors, plain = take_apart((given.args, given.kwargs))
        sent = self._stage._ends.inputs
        items = [self._send(sent[at], t) if at in sent else _as_ghost(t) for at, t in enumerate(tensors)]
        self._facts["inputs"] = {"t": items, "p": plain}

    def boundary(self) -> Boundary:
        for name, version in self._versions.items():
            if self._tensors[name]._version != version:
                raise Unsupported(f"{name!r} was changed in place before the cut, which it was not on the example")
        assert self._stage._ends is not None
        facts = {**self._facts, "calls": self._calls}
        return Boundary(self._stage._ends.at, self._stage.fingerprint, self._tensors, facts)

    def _item(self, step: Step, at: int, tensor: Tensor, arguments: list[Tensor]) -> Any:
        if at in step.views:
            of = arguments[step.views[at]]
            offset = tensor.storage_offset() - of.storage_offset()
            return [list(of.stride()), list(tensor.shape), list(tensor.stride()), offset]
        if at in step.outputs:
            return self._send(step.outputs[at], tensor)
        return None if step.same[at] is not None else _as_ghost(tensor)

    def _send(self, sent: Sent, tensor: Tensor) -> Any:
        tensor = awake(tensor)
        if isinstance(tensor, Ghost):
            raise GhostRead(f"{sent.name!r} is to cross a later cut and did not cross the one before", tensor)
        tensor = tensor.detach()
        if sent.joined:
            return self._join(sent.name, tensor)
        name = sent.name
        while (known := self._tensors.get(name)) is not None and (sent.copied or not _is_same(known, tensor)):
            name += "'"
        if known is None:
            self._tensors[name] = tensor = tensor.clone() if sent.copied else tensor
            if not tensor.is_inference():
                self._versions[name] = tensor._version
        return name

    def _join(self, name: str, tensor: Tensor) -> Any:
        """Send the memory that a value lies in, so that others in it stay others in it."""
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
        for known, held in self._tensors.items():
            if held.untyped_storage()._cdata == storage._cdata and held.dim() == 1 and _is_same(held, whole):
                name = known
                break
        else:
            self._tensors[name] = whole
        return [name, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]

    # -- what has crossed from the one before --------------------------------------------------------------------------

    def inputs(self, boundary: Boundary) -> Inputs:
        """The model's arguments: those that were sent, and ghosts of the others."""
        template, entry = self._stage._inputs, boundary.facts.get("inputs", {})
        if not _is_entry(entry):
            raise BadBoundary("the boundary does not say what the model was given: have it sent again")
        if len(entry["t"]) != template.tensors or len(entry["p"]) != template.plain:
            raise BadBoundary(
                f"the head was given {len(entry['t'])} tensors and {len(entry['p'])} other values, and the example has "
                f"{template.tensors} and {template.plain}: split both sides on examples of one structure"
            )
        tensors = [self._tensor(item, "an input", Place(None, at)) for at, item in enumerate(entry["t"])]
        args, kwargs = template.fill(tensors, entry["p"])
        return Inputs(*args, **kwargs)

    def _tensor(self, item: Any, of: str, place: Place | None) -> Tensor:
        if isinstance(item, str):
            return self._get(item)
        try:
            if isinstance(item, dict):
                meta = torch.empty(item["shape"], dtype=_dtype(item["dtype"]), device="meta")
                if item["strides"] is not None:
                    meta = torch.empty_strided(item["shape"], item["strides"], dtype=meta.dtype, device="meta")
                return Ghost(meta, self._device or torch.device("cpu"), of, place)
            name, shape, strides, offset = item
            return self._get(name).as_strided(shape, strides, offset)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise BadBoundary(f"what the boundary says of {of!r} makes no tensor: {said(error)}") from error

    def _refill(
        self, step: Step, told: list[Any], lists: list[Any], tensors: list[Tensor], arguments: list[Tensor]
    ) -> None:
        """Have lists and dicts hold what the call that is left out would have put there."""
        try:
            for at, (keys, items) in zip(step.changes, told, strict=True):
                held = [self._held(item, step, tensors, arguments) for item in items]
                if keys is None:
                    lists[at][:] = held
                else:
                    lists[at].clear()
                    lists[at].update(zip(keys, held, strict=True))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise BadBoundary(
                f"what the boundary says of the lists that {step.address!r} changes does not fit them: {said(error)}"
            ) from error

    def _held(self, item: dict[str, Any], step: Step, tensors: list[Tensor], arguments: list[Tensor]) -> Any:
        if "value" in item:
            return item["value"]
        if "output" in item:
            return tensors[item["output"]]
        return arguments[item["argument"]] if "argument" in item else self._tensor(item, step.address, None)

    def _get(self, name: str) -> Tensor:
        """A tensor that was sent; a copy, if the model writes into it."""
        if name not in self._given:
            assert self._received is not None
            assert self._stage._begins is not None
            sent = self._received.tensors.get(name)
            if sent is None:
                raise BadBoundary(f"the boundary lacks {name!r}: have it sent again")
            tensor = sent if self._device is None else sent.to(self._device)
            written = name.rstrip("'") in self._stage._begins.written
            if tensor is sent and (written or (sent.is_inference() and not torch.is_inference_mode_enabled())):
                tensor = tensor.clone()
            self._given[name] = tensor
        return self._given[name]

    def finished(self, output: Any) -> Any:
        """The model's output, in which nothing may be missing."""
        if self._replay is not None and not self._replay.is_there:
            raise Unsupported(f"the model ended before the cut at {self._stage.begins_at!r}")
        ghosts = [tensor for tensor in tensors_in(output) if isinstance(tensor, Ghost)]
        for one in ghosts:
            if one.alive is None:
                raise GhostRead(f"the model returns a value of {one.of!r}, which did not cross the cut", one)
        return map_tensors(awake, output) if ghosts else output


def _listed(boundary: Boundary, trail: Trail | None) -> list[dict[str, Any]]:
    """What is said of each step; checked, since it comes from elsewhere."""
    assert trail is not None
    steps = list(trail.steps)
    calls = boundary.facts.get("calls")
    if not isinstance(calls, list) or len(calls) != len(steps):
        raise BadBoundary(f"the boundary does not fit: the cut at {trail.at!r} has {len(steps)} calls before it")
    return [_checked(boundary, step, entry) for step, entry in zip(steps, calls, strict=True)]


def _checked(boundary: Boundary, step: Step, entry: Any) -> dict[str, Any]:
    fits = _is_entry(entry) and len(entry["t"]) == step.output.tensors and len(entry["p"]) == step.output.plain
    fits = fits and isinstance(entry.get("a"), dict) and set(entry["a"]) <= set(map(str, step.arguments))
    fits = fits and (not step.changes or isinstance(entry.get("c"), list))
    if not fits:
        raise BadBoundary(f"the boundary says of {step.address!r} what does not fit what it returns on this side")
    return entry


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("t"), list) or not isinstance(entry.get("p"), list):
        return False
    return all(isinstance(value, bool | int | float | str | None) for value in entry["p"])


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _view(of: Tensor, item: Any, step: Step) -> Tensor:
    """What a call that is left out made of an argument: the same memory in another shape."""
    strides, shape, new_strides, offset = item
    of = awake(of)
    if isinstance(of, Ghost):
        return Ghost(
            torch.empty_strided(shape, new_strides, dtype=of.dtype, device="meta"), of.device, of.of, of.source
        )
    if list(of.stride()) != strides:
        raise Unsupported(f"{step.address!r} returns a view of an argument that lies otherwise in memory on this side")
    return of.as_strided(shape, new_strides, of.storage_offset() + offset)


def _as_ghost(tensor: Tensor) -> dict[str, Any]:
    strides = None if tensor.is_contiguous() else list(tensor.stride())
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "strides": strides}


def _contents(step: Step, holder: Any, tensors: list[Tensor], arguments: list[Tensor]) -> list[Any]:
    """What a call has put into a list or a dict: texts and numbers, what it returns or was given, ghosts of others."""
    keys = list(holder) if isinstance(holder, dict) else None
    items: list[Any] = []
    for item in holder.values() if isinstance(holder, dict) else holder:
        if not isinstance(item, Tensor):
            if not isinstance(item, bool | int | float | str | None):
                raise Unsupported(f"{step.address!r} puts a {type(item).__name__} into a list, which it did not before")
            items.append({"value": item})
            continue
        output = [at for at, tensor in enumerate(tensors) if tensor is item]
        argument = [at for at, tensor in enumerate(arguments) if tensor is item]
        if output or argument:
            items.append({"output": output[0]} if output else {"argument": argument[0]})
        else:
            items.append(_as_ghost(item))
    return [keys, items]


def _put_back(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Leave no ghosts in a module that keeps what it computes: what it had before the run is the better answer."""
    for name, value in list(module.__dict__.items()):
        if value is attributes.get(name) or name in _TORCHS:
            continue
        if any(isinstance(tensor, Ghost) for tensor in tensors_in(value)):
            if name in attributes:
                module.__dict__[name] = attributes[name]
            else:
                del module.__dict__[name]


_TORCHS = frozenset(nn.Module().__dict__)


def _run_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Run a module's forward hooks for what they do; what they return is part of the output that was sent."""
    for key, hook in list(module._forward_hooks.items()):
        with suppress(GhostRead):  # what it wanted to see was there in the head
            if key in module._forward_hooks_with_kwargs:
                hook(module, args, kwargs, output)
            else:
                hook(module, args, output)


def _revive(argument: Tensor, tensor: Tensor) -> Tensor:
    """Have an argument hold what the call that is left out would have written into it."""
    held = awake(argument)
    if isinstance(held, Ghost):
        held.alive = tensor
        return tensor
    if held is not tensor:
        with torch.no_grad():
            held.copy_(tensor)
    return held
