"""The two phases of a language model: the prefill, one run over the prompt, and decoding, a run for each new token."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine import Call, Probe
from microtome.engine.argument_names import named_arguments
from microtome.engine.arguments import copy_arguments
from microtome.engine.meta_tensors import value_of
from microtome.engine.pytree import is_plain_class, reachable_tensors
from microtome.engine.selectors import unwrap_model
from microtome.engine.torch_internals import storage_id
from microtome.errors import BadInputs, Unsupported
from microtome.inputs import Inputs
from microtome.results.metrics import advise, own_options
from microtome.trace.trace import record

PHASES = ("prefill", "decode")
#: The tokens that a decoder takes, the argument of an encoder-decoder model first.
_TOKENS = ("decoder_input_ids", "input_ids")
#: The mask of each argument of tokens.
_MASKS = {"decoder_input_ids": "decoder_attention_mask", "input_ids": "attention_mask"}
_POSITIONS = ("position_ids", "cache_position", "decoder_position_ids")
#: How many of the last positions have logits: of transformers, and of its older versions.
_LOGITS = ("logits_to_keep", "num_logits_to_keep")
#: The output of an encoder, which the decoder takes again at every token.
_ENCODED = "encoder_last_hidden_state"


@dataclass(frozen=True)
class Prompt:
    """The inputs of the prefill of a language model.

    Attributes:
        arguments: The arguments by name.
        tokens: The name of the token ids, of shape (batch, length).
    """

    model: nn.Module
    arguments: dict[str, Any]
    tokens: str

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> Prompt:
        """Read the prompt from the inputs of a model, which then returns a cache.

        Where `forward` can return the logits of the last position only, it does, as in `generate` of transformers,
        which passes `logits_to_keep=1` for the prompt and for each token. Inputs that set it count. Where it takes an
        empty cache, and returns it, it gets one.
        """
        arguments = named_arguments(model, Inputs.of(inputs, model))
        name = next((name for name in _TOKENS if isinstance(arguments.get(name), Tensor)), None)
        if name is None or arguments[name].dim() != 2:
            got = f"{name} of {arguments[name].dim()} dimensions" if name else ", ".join(arguments) or "no arguments"
            raise BadInputs(
                f"phases need token ids of shape (batch, length) as {' or '.join(_TOKENS)}: expected such an argument "
                f"of {type(unwrap_model(model)).__name__}.forward, got {got}"
            )
        parameters = _parameters(model)
        if "use_cache" in parameters:
            arguments["use_cache"] = True
        else:
            arguments |= _new_states(model, arguments)
        if not any(name in arguments for name in _LOGITS):
            arguments |= {name: 1 for name in _LOGITS if name in parameters}
        return cls(model, arguments, name)

    @property
    def batch(self) -> int:
        return int(self.arguments[self.tokens].shape[0])

    @property
    def length(self) -> int:
        return int(self.arguments[self.tokens].shape[1])

    @property
    def logits_to_keep(self) -> int | None:
        """The number of last positions whose logits are computed; None: all of them, or chosen ones."""
        kept = next((self.arguments[name] for name in _LOGITS if name in self.arguments), 0)
        return kept if isinstance(kept, int) and kept > 0 else None

    @property
    def inputs(self) -> Inputs:
        return Inputs(**self.arguments)

    def resized(self, length: int) -> Prompt:
        """Return a prompt of another length, of the same tokens, repeated."""
        if length < 1:
            raise BadInputs(f"expected a prompt of 1 token or more, got {length}")
        alike = [name for name, value in self.arguments.items() if _has_length(value, self.length)]
        resized = {name: _repeat(self.arguments[name], length) for name in alike}
        return Prompt(self.model, self.arguments | resized, self.tokens)

    def states_in(self, output: Any) -> dict[str, Any]:
        """Return the state that a run returned for the next one: a KV cache, or recurrent states, by argument.

        Raises:
            Unsupported: The output holds none.
        """
        states = _states_in(self.model, output)
        if not states:
            returned = dict(output) if isinstance(output, Mapping) else {}
            name = type(unwrap_model(self.model)).__name__
            got = f"an output of {', '.join(returned)}" if returned else f"a {type(output).__name__}"
            options = " and ".join(own_options("--prefill", "--decode", "--tokens"))
            raise Unsupported(
                f"{name} returns no cache for the next token: phases need an output such as past_key_values, which "
                f"forward also takes; got {got}. Leave out {advise('phases', options)}"
            )
        return states

    def check_returns_state(self) -> None:
        """Raise Unsupported if a run returns no state, as `states_in` does."""
        self.states_in(_output_of(self.model, self.inputs))

    def next_token(self, output: Any) -> Inputs:
        """Return the arguments of the run for one more token of each sequence.

        They are the state, the token, and flags. Other tensors, such as images, belong to the prompt.
        """
        arguments = {name: value for name, value in self.arguments.items() if not _has_tensors(value)}
        last: Tensor = self.arguments[self.tokens][:, -1:].clone()
        arguments[self.tokens] = last
        mask = self.arguments.get(_MASKS[self.tokens])
        if isinstance(mask, Tensor):
            arguments[_MASKS[self.tokens]] = torch.cat([mask, mask[..., -1:]], dim=-1)
        for name in _POSITIONS:
            if isinstance(positions := self.arguments.get(name), Tensor):
                arguments[name] = positions[..., -1:] + 1
        if self.tokens == "decoder_input_ids":
            arguments |= self._encoded(output)
        return Inputs(**arguments | self.states_in(output))

    def _encoded(self, output: Any) -> dict[str, Any]:
        """Return the encoder's output, so that it does not run again, and the mask of its tokens."""
        if _ENCODED not in output or "encoder_outputs" not in _parameters(self.model):
            name = type(unwrap_model(self.model)).__name__
            raise Unsupported(f"expected {name} to return {_ENCODED} and to take encoder_outputs, for the next token")
        masks = {name: self.arguments[name] for name in ("attention_mask",) if name in self.arguments}
        return {"encoder_outputs": (output[_ENCODED],), **masks}


class OutputProbe(Probe):
    """Keeps the output of the model, with tensors without values in place of those that a run without values has."""

    def __init__(self) -> None:
        self.output: Any = None

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not call.path and call.phase == "forward":
            self.output = copy_arguments(Inputs(output), _detach).args[0]


def state_bytes(states: Mapping[str, Any]) -> int:
    """Return the bytes of the tensors of a state, those in one storage together at most its bytes."""
    sizes: dict[int, int] = {}
    views = {
        (storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()): tensor
        for tensor in reachable_tensors(dict(states))
    }
    for (storage, *_), tensor in views.items():
        sizes[storage] = min(sizes.get(storage, 0) + tensor.nbytes, tensor.untyped_storage().nbytes())
    return sum(sizes.values())


def _states_in(model: nn.Module, output: Any) -> dict[str, Any]:
    """Return the values with tensors that a run returned, and that `forward` takes, by argument."""
    returned = dict(output) if isinstance(output, Mapping) else {}
    taken = _parameters(model)
    return {name: value for name, value in returned.items() if name in taken and _has_tensors(value)}


def _new_states(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new object for each optional argument that was not passed, and that the model then returns as state."""
    made: dict[str, Any] = {}
    for name, cls in _optional_classes(model).items():
        if arguments.get(name) is None:
            with suppress(Exception):  # the class needs arguments, or the model raises
                state = cls()
                if name in _states_in(model, _output_of(model, Inputs(**{**arguments, name: state}))):
                    made[name] = state
    return made


def _optional_classes(model: nn.Module) -> dict[str, type]:
    """Return the plain classes of arguments that are None by default, as in `cache: KVCache | None = None`."""
    try:
        hints = typing.get_type_hints(unwrap_model(model).forward)
    except Exception:  # noqa: BLE001  annotations are code of the user's
        return {}
    classes: dict[str, type] = {}
    for name, parameter in _parameters(model).items():
        plain = [one for one in typing.get_args(hints.get(name)) if isinstance(one, type) and is_plain_class(one)]
        if parameter.default is None and len(plain) == 1:
            classes[name] = plain[0]
    return classes


def _output_of(model: nn.Module, inputs: Inputs) -> Any:
    """Return the output of a run, without values where possible."""
    probes: list[OutputProbe] = []

    def make_probes(_: object) -> list[OutputProbe]:
        probes.append(OutputProbe())
        return probes[-1:]

    record(model, inputs, make_probes=make_probes)
    return probes[-1].output


def _detach(tensor: Tensor) -> Tensor:
    """Return a tensor that outlives a run on substitutes: on meta, unless its values are known."""
    if type(tensor) is Tensor and not tensor.is_meta:
        return tensor.detach()
    known = value_of(tensor) if tensor.is_meta else None
    if known is not None:
        return known
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _has_tensors(value: Any) -> bool:
    return next(reachable_tensors(value), None) is not None


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(unwrap_model(model).forward).parameters


def _has_length(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[-1] == length


def _repeat(tensor: Tensor, length: int) -> Tensor:
    return tensor.repeat(1, -(-length // tensor.shape[-1]))[:, :length].contiguous()
