"""One run of a stage."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.engine import Call, Probe
from microtome.engine.module_state import has_forward_hooks, run_forward_hooks
from microtome.engine.pytree import map_tensors, reachable_tensors, tensor_occurrences
from microtome.engine.torch_internals import storage_id, version_of
from microtome.errors import BadBoundary, Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.split.arrays import array_name, to_array, to_tensor
from microtome.split.boundary import Boundary
from microtome.split.call_arguments import CallArguments, containers_in, record_arguments
from microtome.split.crossing import ValueLocation
from microtome.split.effects import (
    argument_of,
    around_of,
    as_ghost,
    as_other,
    check_entry,
    check_way,
    choose_sent,
    contents,
    draws_of,
    dtype_of,
    first_places,
    is_argument,
    is_entry,
    is_same,
    listed,
    repeated,
    revive,
    shared,
    sharing,
    uses,
    view,
    with_grad,
)
from microtome.split.placeholder import Placeholder, PlaceholderRead, awake
from microtome.split.schedule import Schedule, ScheduleFollower, SentValue, SkippedCall
from microtome.split.signature import HASH_SEED, check_same_call, describe, find_call, sign
from microtome.split.size_bounds import SizeBudget
from microtome.split.structure_spec import StructureSpec, check_structure, flatten
from microtome.split.tensor_bytes import duplicate, moved


class StageRun(Probe):
    """One run of a stage: leaves out what lies before it, and takes what crosses after it."""

    def __init__(self, begins: Schedule | None, ends: Schedule | None, inputs: StructureSpec) -> None:
        self._begins = begins
        self._ends = ends
        self._inputs = inputs
        self.begin()

    def begin(
        self, boundary: Boundary | None = None, device: torch.device | None = None, *, release: bool = False
    ) -> None:
        """Forget the run before.

        Args:
            boundary: What the stage before gave.
            device: Where what was sent is brought to.
            release: Whether the boundary lets go of what has been used.
        """
        self._thread = get_ident()
        self._device = device
        self._replay = None if self._begins is None else ScheduleFollower(self._begins)
        self._bank = None if self._ends is None else ScheduleFollower(self._ends)
        self._received = boundary
        entries = [] if boundary is None else listed(boundary, self._begins)
        self._entries = entries
        self._is_ordered = boundary is not None and boundary.facts.get("hash_seed") == HASH_SEED
        self._taken: set[int] = set()
        self._expected = iter(() if boundary is None else around_of(boundary))
        self._uses = (
            None
            if boundary is None or not release
            else uses([boundary.facts.get("inputs"), *entries, *draws_of(boundary)])
        )
        self._sizes = SizeBudget(boundary, None if self._begins is None else self._begins.example)
        self._shared = frozenset() if boundary is None else shared(boundary)
        self._given: dict[str, Tensor] = {}
        self._still: list[tuple[str, Tensor, int]] = []
        self._skip: tuple[Call, SkippedCall] | None = None
        self._open: dict[Call, tuple[SkippedCall, CallArguments, dict[str, Any]]] = {}
        self._around: list[dict[str, Any]] = []
        self._tensors: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._calls: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}
        self._overlapping: list[str] = []  # inputs, copies of which have memory of their own

    # -- what the session asks -----------------------------------------------------------------------------------------

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase != "forward" or get_ident() != self._thread:
            return
        self._skip = None
        found = None if self._replay is None else self._replay.enter(call, args, kwargs)
        if isinstance(found, SkippedCall):
            self._skip = call, found
        elif found is not None:
            given_here = describe(args, kwargs, model=call.stack[0].module)
            check_same_call(next(self._expected, None), found, given_here, is_ordered=self._is_ordered)
        found = None if self._bank is None else self._bank.enter(call, args, kwargs)
        if isinstance(found, SkippedCall):
            arguments = describe(args, kwargs, in_order=found.uses_arguments, model=call.stack[0].module)
            self._open[call] = (
                found,
                record_arguments(args, kwargs),
                sign(found.key, arguments, found.flow, found.returns),
            )
        elif found is not None:
            self._around.append(sign(found.key, describe(args, kwargs, model=call.stack[0].module), found.flow))

    def is_skipped(self, call: Call) -> bool:
        return self._skip is not None and self._skip[0] is call and get_ident() == self._thread

    def output(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a skipped call: what was sent, and placeholders for the rest."""
        assert self._skip is not None
        assert self._replay is not None
        step = self._skip[1]
        entry = self._entry(step, call, args, kwargs)
        arguments = list(tensor_occurrences((args, kwargs))) if step.uses_arguments else []
        for at, item in entry["a"].items():
            place = ValueLocation(step.call, step.taken[int(at)], is_argument=True)
            revive(arguments[int(at)], self._tensor(item, step.address, place))
        tensors: list[Tensor] = []
        for at, (item, same) in enumerate(zip(entry["t"], step.same, strict=True)):
            place = ValueLocation(step.call, step.given[at])
            if (first := repeated(item)) is not None:
                tensors.append(tensors[first])
            elif at in step.views:
                tensors.append(view(arguments[step.views[at]], item, step, self._sizes))
            elif isinstance(item, dict) and "argument" in item:
                tensors.append(argument_of(step, item, arguments))
            elif same is None or isinstance(item, dict):  # or it went another way than on the example
                tensors.append(self._tensor(item, step.address, place))
            elif item is not None:
                tensors.append(revive(arguments[same], self._tensor(item, step.address, place)))
            else:  # what it holds is right, or nobody reads it before it is written again
                tensors.append(arguments[same])
        if step.changes:
            self._refill(step, entry["c"], containers_in((args, tuple(kwargs.values()))), tensors, arguments)
        self._still += [(step.address, arguments[at], version_of(arguments[at])) for at in step.shares]
        self._replay.exit()
        output = step.output.unflatten(tensors, entry["p"], (args, kwargs))
        if call.module is not None and has_forward_hooks(call.module):
            # What they return is part of the output that was sent; what they could not see was there in the head.
            run_forward_hooks(call.module, args, kwargs, output, ignore=PlaceholderRead)
        return output

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._bank is None or (opened := self._open.pop(call, None)) is None:
            return
        step, had, signature = opened
        template, tensors, plain = flatten(output, (args, kwargs))
        check_structure(f"what {step.address!r} returns", step.output, template)
        if not self.is_skipped(call):
            check_way(step, had, tensors)
        arguments, lists = had.tensors, had.containers  # those that it was given, whatever they hold now
        self._calls.append(
            {
                "t": self._items(step, tensors, arguments),
                "p": plain,
                "a": {str(at): self._send(sent, arguments[at]) for at, sent in step.arguments.items()},
                **signature,
            }
        )
        if step.changes:
            self._calls[-1]["c"] = [contents(step, lists[at], tensors, arguments) for at in step.changes]
        self._bank.exit()

    def is_over(self, call: Call) -> bool:
        return self._bank is not None and self._bank.is_there and get_ident() == self._thread

    # -- what crosses to the next --------------------------------------------------------------------------------------

    def take_inputs(self, inputs: Inputs) -> None:
        """Keep what the next stage needs of the model's arguments."""
        if self._ends is None:
            return
        arrays: list[Any] = []
        template, tensors, plain = flatten((inputs.args, inputs.kwargs), arrays=arrays)
        if template.unsupported is not None:
            raise Unsupported(f"the model is given a {template.unsupported}, which cannot be sent: give a copy")
        sent = self._ends.inputs
        items: list[Any] = []
        own: dict[str, Tensor] = {}
        firsts = first_places(tensors)
        for at, (tensor, first) in enumerate(zip(tensors, firsts, strict=True)):
            chosen = choose_sent(sent, firsts, at, "an input")
            if first != at:
                items.append({"repeats": first})
                continue
            items.append(as_ghost(tensor) if chosen is None else self._send(chosen, tensor))
            if not isinstance(awake(tensor), Placeholder) and tensor.layout is torch.strided and not tensor.is_nested:
                own[str(at)] = awake(tensor)
        self._overlapping = [item for at in sharing(own) if isinstance(item := items[int(at)], str)]
        self._facts["inputs"] = {"t": items, "p": plain, "k": xxh3_64_hexdigest(template.text.encode())}
        if arrays:
            self._tensors.update((array_name(at), to_tensor(array)) for at, array in enumerate(arrays))

    def boundary(self, fingerprint: str) -> Boundary:
        self._check_still()
        for name, version in self._versions.items():
            if version_of(self._tensors[name]) != version:
                raise Unsupported(f"{name!r} was changed in place before the cut, which it was not on the example")
        assert self._ends is not None
        overlapping = [*sharing(self._tensors), *self._overlapping]
        facts = {**self._facts, "calls": self._calls, "around": self._around, "shared": overlapping}
        facts["hash_seed"] = HASH_SEED
        return Boundary(self._ends.at, fingerprint, self._tensors, facts)

    def _items(self, step: SkippedCall, tensors: list[Tensor], arguments: list[Tensor]) -> list[Any]:
        firsts = first_places(tensors)
        return [
            self._item(step, at, tensor, arguments, choose_sent(step.outputs, firsts, at, step.address))
            if firsts[at] == at
            else {"repeats": firsts[at]}
            for at, tensor in enumerate(tensors)
        ]

    def _item(self, step: SkippedCall, at: int, tensor: Tensor, arguments: list[Tensor], sent: SentValue | None) -> Any:
        if at in step.views:
            of = arguments[step.views[at]]
            offset = tensor.storage_offset() - of.storage_offset()
            return [list(of.stride()), list(tensor.shape), list(tensor.stride()), offset]
        if sent is not None:
            return self._send(sent, tensor)
        return None if is_argument(step, at, tensor, arguments) else as_other(step, at, tensor, arguments)

    def _send(self, sent: SentValue, tensor: Tensor) -> Any:
        tensor = awake(tensor)
        if isinstance(tensor, Placeholder):
            raise PlaceholderRead(f"{sent.name!r} is to cross a later cut and did not cross the one before", tensor)
        had_grad, tensor = tensor.requires_grad, tensor.detach()
        if sent.joined:
            return self._join(sent.name, tensor)
        name = sent.name
        while (known := self._tensors.get(name)) is not None and (sent.copied or not is_same(known, tensor)):
            name += "'"
        if known is None:
            self._tensors[name] = tensor = duplicate(tensor) if sent.copied else tensor
            self._versions[name] = version_of(tensor)
        if had_grad and torch.is_grad_enabled():
            self._facts.setdefault("requires_grad", {})[name] = True
        return name

    def _join(self, name: str, tensor: Tensor) -> Any:
        """Send the memory that a value lies in, so that others in it stay others in it."""
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
        for known, held in self._tensors.items():
            if storage_id(held) == storage_id(tensor) and held.dim() == 1 and is_same(held, whole):
                name = known
                break
        else:
            self._tensors[name] = whole
        return [name, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]

    # -- what has crossed from the one before --------------------------------------------------------------------------

    def _entry(self, step: SkippedCall, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The boundary's entry for a call that is left out."""
        arguments = describe(args, kwargs, in_order=step.uses_arguments, model=call.stack[0].module)
        at = find_call(self._entries, self._taken, step, arguments, is_ordered=self._is_ordered)
        if at != len(self._taken) and self._begins is not None and self._begins.draws:
            raise Unsupported(
                f"{step.address!r} runs in another order than in the head, and the model draws random numbers between "
                "calls before the cut: set PYTHONHASHSEED to the same value in both processes"
            )
        self._taken.add(at)
        check_entry(step, self._entries[at])
        return self._entries[at]

    def inputs(self, boundary: Boundary) -> Inputs:
        """The model's arguments: those that were sent, and ghosts of the others."""
        template, entry = self._inputs, boundary.facts.get("inputs", {})
        if not is_entry(entry):
            raise BadBoundary("the boundary does not say what the model was given: have it sent again")
        if len(entry["t"]) != template.num_tensors or len(entry["p"]) != template.num_plain:
            raise BadBoundary(
                f"the head was given {len(entry['t'])} tensors and {len(entry['p'])} other values, and the example has "
                f"{template.num_tensors} and {template.num_plain}: split both sides on examples of one structure"
            )
        if entry.get("k") != xxh3_64_hexdigest(template.text.encode()):
            raise BadBoundary(
                f"the head was given inputs of another structure than the example on this side, which is "
                f"{template.text}: split both sides on examples of one structure, with the same order of names"
            )
        assert self._begins is not None
        tensors: list[Tensor] = []
        for item, rank in zip(entry["t"], self._begins.taken, strict=True):
            first = repeated(item)
            tensors.append(
                self._tensor(item, "an input", ValueLocation(None, rank)) if first is None else tensors[first]
            )
        arrays = [to_array(self._array(array_name(at))) for at in range(template.num_arrays)]
        args, kwargs = template.unflatten(tensors, entry["p"], arrays=arrays)
        return Inputs(*args, **kwargs)

    def _tensor(self, item: Any, of: str, place: ValueLocation | None) -> Tensor:
        if isinstance(item, str):
            return self._get(item, place)
        try:
            if isinstance(item, dict):
                shape, strides, dtype = item["shape"], item["strides"], dtype_of(item["dtype"])
                self._sizes.take(of, shape, strides, dtype)
                meta = torch.empty(shape, dtype=dtype, device="meta")
                if strides is not None:
                    meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                return with_grad(Placeholder(meta, self._device or torch.device("cpu"), of, place), item)
            name, shape, strides, offset = item
            whole = self._get(name, place)
            self._sizes.take(of, shape, strides, whole.dtype)
            return whole.as_strided(shape, strides, offset)
        except BadBoundary:
            raise
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise BadBoundary(f"what the boundary says of {of!r} makes no tensor: {describe_error(error)}") from error

    def _refill(
        self, step: SkippedCall, told: list[Any], lists: list[Any], tensors: list[Tensor], arguments: list[Tensor]
    ) -> None:
        """Have lists and dicts hold what the call that is left out would have put there."""
        try:
            for at, (keys, items) in zip(step.changes, told, strict=True):
                held = [self._held(item, step, tensors, arguments) for item in items]
                if (keys is None) is not isinstance(lists[at], list):
                    raise TypeError(f"it is a {type(lists[at]).__name__}")
                if keys is None:
                    lists[at][:] = held
                else:
                    lists[at].clear()
                    lists[at].update(zip(keys, held, strict=True))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise BadBoundary(
                f"what the boundary says of the lists that {step.address!r} changes does not fit them: "
                f"{describe_error(error)}"
            ) from error

    def _held(self, item: dict[str, Any], step: SkippedCall, tensors: list[Tensor], arguments: list[Tensor]) -> Any:
        if "value" in item:
            return item["value"]
        if "output" in item:
            return tensors[item["output"]]
        return arguments[item["argument"]] if "argument" in item else self._tensor(item, step.address, None)

    def _get(self, name: str, place: ValueLocation | None) -> Tensor:
        """A tensor that was sent; a copy, if the model writes into it."""
        if name not in self._given:
            assert self._received is not None
            assert self._begins is not None
            sent = self._received.tensors.get(name)
            if sent is None:
                raise BadBoundary(f"the boundary lacks {name!r}: have it sent again")
            tensor = sent if self._device is None else moved(sent, self._device)
            written = place in self._begins.written
            if written and name in self._shared:
                raise Unsupported(
                    f"expected {name!r} to have memory of its own, got a tensor that overlaps another in memory, and "
                    "the model changes it in place. Give it tensors that do not overlap, or split it on an example "
                    "where they overlap"
                )
            if tensor is sent and (written or (sent.is_inference() and not torch.is_inference_mode_enabled())):
                tensor = duplicate(tensor)
            tensor = with_grad(tensor, self._received.facts.get("requires_grad"), name)
            self._given[name] = tensor
            if not written and (self._uses is None or name in self._shared):
                self._still.append((name, tensor, version_of(tensor)))
        tensor = self._given[name]
        if self._uses is not None and self._received is not None:
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._given[name], self._received.tensors[name]
        return tensor

    def _array(self, name: str) -> Tensor:
        """The tensor that was sent for an array, which is copied."""
        assert self._received is not None
        if name not in self._received.tensors:
            raise BadBoundary(f"the boundary lacks {name!r}: have it sent again")
        return self._received.tensors[name] if self._uses is None else self._received.tensors.pop(name)

    def _check_still(self) -> None:
        for name, tensor, version in self._still:
            if version_of(tensor) != version:
                raise Unsupported(
                    f"{name!r}, or what it was given, is changed in place after the cut, which it was not on the "
                    "example. Split it on an example where it is"
                )

    def finished(self, output: Any) -> Any:
        """The model's output, in which nothing may be missing."""
        self._check_still()
        if self._begins is not None and self._replay is not None and not self._replay.is_there:
            raise Unsupported(f"the model ended before the cut at {self._begins.at!r}")
        ghosts = [tensor for tensor in reachable_tensors(output) if isinstance(tensor, Placeholder)]
        for one in ghosts:
            if one.alive is None:
                raise PlaceholderRead(f"the model returns a value of {one.of!r}, which did not cross the cut", one)
        return map_tensors(awake, output) if ghosts else output
