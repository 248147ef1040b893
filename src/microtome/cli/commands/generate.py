"""`microtome generate`: continue a text with a language model, whole or split between this machine and a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from microtome.cli.interrupts import Interrupted, import_torch
from microtome.cli.options.connection import check_server, connection_options
from microtome.cli.options.model import ModelOptions, model_options, wrap_model_errors
from microtome.cli.options.numbers import Number, WholeNumber
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.options.repetition import Command, list_option
from microtome.cli.options.requirements import refuse_options
from microtome.cli.progress import print_notes, show_progress
from microtome.cli.token_printer import TokenPrinter
from microtome.errors import BadInputs, MicrotomeError, Unsupported, describe_error
from microtome.units import plural, seconds, size, some

if TYPE_CHECKING:
    from torch import Tensor

    from microtome.cli.tokenizers import Tokenizer
    from microtome.remote.security import Security
    from microtome.results.requests import RequestRecord
    from microtome.split.session import StageSession
    from microtome.zoo import Resolved

_AT = "Cut: an address of `microtome cuts`. Without --server, two stages in this process (default: auto, or no cut)."
_NO_FALLBACK = "Fail if the server goes away: compute nothing of its part here."
#: Tokens of the prompt that both sides are warmed up with, and the tokens generated from them.
_WARM_UP_PROMPT, _WARM_UP_TOKENS = 8, 2


#: The most digits of a token: of a larger number, torch makes no tensor.
_MAX_DIGITS = 18


def _parse_ids(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and len(word) <= _MAX_DIGITS for word in words):
        raise click.BadParameter(f"expected tokens as numbers, such as 1,15,7, got {text!r:.80}")
    return [int(word) for word in words]


@click.command(cls=Command)
@model_options("weights", "device")
@click.option("--prompt", metavar="TEXT", help="Text to continue, for a model with a tokenizer.")
@list_option("--ids", metavar="1,2,3", callback=_parse_ids, help="Tokens to continue, in place of --prompt.")
@click.option("--tokens", type=WholeNumber(1), default=50, metavar="N", help="Maximum number of new tokens.")
@click.option("--at", metavar="ADDRESS", help=_AT)
@click.option("--server", metavar="HOST:PORT", callback=check_server, help="Run the tail on this server.")
@click.option("--codec", metavar="NAME", help="Codec of the boundary, such as raw or fp16 (default: auto).")
@click.option("--no-fallback", is_flag=True, help=_NO_FALLBACK)
@click.option(
    "--temperature",
    type=Number(min=0),
    default=0.0,
    metavar="T",
    help="Draw tokens at this temperature; 0: choose the most probable.",
)
@click.option("--top-k", type=WholeNumber(1), metavar="K", help="Draw among the K most probable tokens.")
@click.option("--seed", type=int, metavar="N", help="Seed of the draws (default: another one each time).")
@output_options("json")
@connection_options
def generate(
    *,
    model: ModelOptions,
    prompt: str | None,
    ids: list[int] | None,
    tokens: int,
    at: str | None,
    server: str | None,
    codec: str | None,
    no_fallback: bool,
    temperature: float,
    top_k: int | None,
    seed: int | None,
    outputs: Outputs,
    security: Security | None,
    timeout: float,
) -> None:
    """Continue a text with a language model, and print it as it is generated.

    MODEL is as for `microtome profile`, with a method `generate`: hf:FOLDER with the files of its tokenizer, or
    zoo:tiny-writer; of other models, --ids passes tokens. With --server, the head runs here and the tail there, and
    each keeps its own part of the KV cache; if the server goes away, this machine continues.
    """
    if (prompt is None) == (ids is None):
        raise click.UsageError("expected one of --prompt and --ids")
    if server is None:
        refuse_options(("codec", "no_fallback", "timeout"), "applies to a server: add --server")
    if not temperature:
        refuse_options(("top_k", "seed"), "applies to draws: add --temperature")
    import_torch()
    import torch

    from microtome.cli.tokenizers import find_tokenizer

    model.check_has_values()
    if (model_class := model.find_class()) is not None:
        _check_generates(model.name, model_class)  # before a large model is built
    resolved = model.resolve(uses_values=True, one_pass=False)
    target = resolved.model
    _check_generates(model.name, target)
    tokenizer = find_tokenizer(model.name, target)
    prompt_ids = ids or _encode(model.name, tokenizer, prompt or "")
    _check_vocabulary(model.name, target, prompt_ids)
    input_ids = torch.tensor([prompt_ids], device=next(target.parameters()).device)
    options = {"max_new_tokens": tokens, **_sampling(temperature, top_k)}
    connection = {"timeout": timeout, "codec": codec or "auto", "fallback": None if no_fallback else "local"}
    if security is not None:
        connection |= asdict(security)
    printer = TokenPrinter(tokenizer, prompt_ids, to_stderr=outputs.files["json"] == "-")
    is_interrupted = False
    with (
        _open(resolved, at, server, connection) as runner,
        _wrap_errors(model.name),
    ):
        with show_progress(f"warming up {model.name}"):
            runner.warm_up(input_ids, options)
        seed = torch.seed() if seed is None else torch.manual_seed(seed).initial_seed()
        try:
            with printer:
                runner.generate(input_ids, options | {"streamer": printer})
        except KeyboardInterrupt:
            is_interrupted = True
    result = _result(model.name, at, printer, runner) | {"temperature": temperature, "seed": seed}
    if printer.tokens:
        click.echo(_summary(result, has_server=server is not None), err=True)
        outputs.write({"json": lambda: json.dumps(result, indent=1) + "\n"}, None)
    if result["reason"] is not None:
        print_notes([f"this machine continued without the server: {result['reason']}"])
    if is_interrupted:
        raise Interrupted


# -- the model and its tokens ------------------------------------------------------------------------------------------


def _check_generates(name: str, model: Any) -> None:
    """Raise if a model or its class has no `generate`, and name the class of transformers that has one."""
    if callable(getattr(model, "generate", None)):
        return
    model_class = model if isinstance(model, type) else type(model)
    hint = "of your own model, run the steps in Python, with stages.session()"
    if name.startswith("hf:"):
        from microtome.zoo.sources.hf import causal_class

        causal = causal_class(model_class) or "LlamaForCausalLM"
        hint = f"name a class that has one, such as --arg \"architectures=['{causal}']\""
    raise Unsupported(f"{name} is a {model_class.__name__}, which has no method `generate`: {hint}")


def _encode(name: str, tokenizer: Tokenizer | None, prompt: str) -> list[int]:
    if tokenizer is None:
        raise BadInputs(
            f"{name} has no tokenizer: pass the tokens of the prompt with --ids, or hf:FOLDER with the files of one"
        )
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise BadInputs("--prompt: expected a text of one token or more")
    return tokens


def _check_vocabulary(name: str, model: Any, tokens: list[int]) -> None:
    """Raise if a token is not in the vocabulary, if the model tells its size as models of transformers do."""
    try:
        count = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return
    unknown = [token for token in tokens if token >= count]
    if unknown:
        raise BadInputs(f"expected tokens of {name} from 0 to {count - 1}, got {some([*map(str, unknown)], 5)}")


def _sampling(temperature: float, top_k: int | None) -> dict[str, Any]:
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, **({} if top_k is None else {"top_k": top_k})}


def _transformers_options(model: Any, input_ids: Tensor) -> dict[str, Any]:
    """Options without which transformers prints warnings."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return {}
    mask = {"attention_mask": input_ids.new_ones(input_ids.shape)}
    return mask if config.pad_token_id is not None else {**mask, "pad_token_id": 0}  # one text has no padding


@contextmanager
def _wrap_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (MicrotomeError, BrokenPipeError):
        raise
    except Exception as error:
        raise BadInputs(f"{name} does not generate from these tokens: {describe_error(error)}") from error


# -- running it --------------------------------------------------------------------------------------------------------


class _Runner:
    """Generates with the whole model, or with its stages.

    Attributes:
        session: The steps of the last generation; None: the whole model runs here.
    """

    def __init__(self, model: Any, make_session: Callable[[], StageSession] | None = None, requests: Any = ()) -> None:
        self._model = model
        self._make_session = make_session
        self._requests = requests
        self.session: Any = None

    def warm_up(self, input_ids: Tensor, options: dict[str, Any]) -> None:
        """Generate a few tokens, so that the stages for the first step and for the next ones exist on both sides."""
        if self._make_session is not None:
            self.generate(input_ids[:, :_WARM_UP_PROMPT], options | {"max_new_tokens": _WARM_UP_TOKENS})

    def generate(self, input_ids: Tensor, options: dict[str, Any]) -> None:
        options = {**_transformers_options(self._model, input_ids), **options}
        if self._make_session is None:
            self._model.generate(input_ids, **options)
            return
        from microtome.split.session import generate

        with self._make_session() as self.session:
            generate(self._model, self.session, (input_ids,), options)

    def requests_since(self, time: float) -> list[RequestRecord]:
        """The requests since a time of `perf_counter`."""
        return [record for record in self._requests if record.began >= time]


@contextmanager
def _open(resolved: Resolved, at: str | None, server: str | None, options: dict[str, Any]) -> Iterator[_Runner]:
    """Split the model, or connect to the server."""
    model: Any = resolved.model
    if server is not None:
        from microtome.remote.connect import connect

        with show_progress(f"connecting to {server}"), wrap_model_errors(resolved):
            remote = connect(model, resolved.inputs, server, at or "auto", **options)
        with remote:
            yield _Runner(model, remote.session, remote.requests)
    elif at is not None:
        from microtome.split.split import split

        with show_progress(f"splitting at {at}"), wrap_model_errors(resolved):
            stages = split(model, resolved.inputs, at=at)
        yield _Runner(model, stages.session)
    else:
        yield _Runner(model)


# -- the result --------------------------------------------------------------------------------------------------------


def _result(name: str, at: str | None, printer: TokenPrinter, runner: _Runner) -> dict[str, Any]:
    requests = runner.requests_since(printer.started)
    return {
        "kind": "generation",
        "schema": 1,
        "model": name,
        "at": requests[-1].at if requests else None if at == "auto" else at,
        "where": getattr(runner.session, "where", "edge"),
        "replays": getattr(runner.session, "replays", 0),
        "reason": next((record.reason for record in requests if record.where == "edge" and record.reason), None),
        "tokens": printer.tokens,
        "text": printer.text,
        "first_token_s": printer.times[0] - printer.started if printer.times else None,
        "tokens_per_s": len(printer.tokens) / (printer.times[-1] - printer.started) if printer.times else None,
        "per_token": _per_token(printer.times, requests),
    }


def _per_token(times: list[float], requests: list[RequestRecord]) -> dict[str, float] | None:
    """Return the mean seconds and bytes of a token after the first; without requests, the seconds in all.

    `here_s` is the time that neither the wire nor the server accounts for: head, codec, and the choice of the token.
    """
    if len(times) < 2:
        return None
    count = len(times) - 1
    total_s = (times[-1] - times[0]) / count
    steps = [record for record in requests if record.began >= times[0] and record.where == "cloud"]
    if not steps:
        return {"total_s": total_s}
    means = {
        name: sum(getattr(record, name) for record in steps) / count
        for name in (
            "wire_s",
            "server_decode_s",
            "queue_s",
            "tail_s",
            "server_encode_s",
            "sent_bytes",
            "received_bytes",
        )
    }
    elsewhere_s = sum(mean for name, mean in means.items() if name.endswith("_s"))
    return {"total_s": total_s, "here_s": max(total_s - elsewhere_s, 0.0), **means}


def _summary(result: dict[str, Any], *, has_server: bool) -> str:
    at, per_token = result["at"], result["per_token"]
    where = f", cut at {at}" if at is not None else ", all here" if has_server else ""
    first = seconds(result["first_token_s"])
    lines = [
        f"{plural(len(result['tokens']), 'token')}{where}: {result['tokens_per_s']:.1f}/s, the first after {first}"
    ]
    if per_token is not None and "tail_s" in per_token:
        parts = {"here": "here_s", "wire": "wire_s", "tail there": "tail_s"}
        times = ", ".join(f"{seconds(per_token[name])} {part}" for part, name in parts.items())
        sent, received = (size(round(per_token[name])) for name in ("sent_bytes", "received_bytes"))
        lines.append(f"each: {times}; {sent} sent, {received} received")
    return "\n".join(lines)
