"""Sessions on a server: generation over a network, with the KV cache of the tail on the server."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import generate_latest
from torch import nn

import microtome as mt
from microtome.engine.pytree import as_state
from microtome.errors import BadBoundary, RemoteError, Unsupported
from microtome.remote import protocol
from microtome.remote.error_kinds import NoSession, TooLarge
from microtome.remote.prometheus import Metrics
from microtome.remote.remote_session import RemoteSession
from microtome.remote.served_model import ServedModel
from microtome.remote.server import Server, serve
from microtome.remote.session_store import SessionLimits, SessionStore, StateTooLarge
from microtome.remote.step_codec import DeltaCodec, encode_states, parse_edits, parse_split, parse_states
from microtome.remote.tail_session import TailSession
from tests.remote.generating_process import run_kills
from tests.remote.session_fuzz import fuzz
from tests.split.language_models import DECODERS, VOCABULARY, build, build_t5, build_whisper
from tests.split.test_generate import MODES
from tests.split.test_sessions import EXAMPLE, STEPS, Lazy, Memory, Model, run

IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_fill(1, torch.tensor([0, 1]), 0)  # padding on the left
EXAMPLE_IDS = {"input_ids": IDS}
QUICK = ("llama", "gemma3")
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DECODERS]


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")[0]


AT = "model.layers.1"


@pytest.fixture
def server(llama: Any) -> Iterator[Server]:
    with serve(llama, EXAMPLE_IDS, listen="127.0.0.1:0") as server:
        yield server


def tokens(model: Any, count: int = 20, rows: int = 2, **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    answer: torch.Tensor = model.generate(
        IDS[:rows], attention_mask=MASK[:rows], max_new_tokens=count, **{"do_sample": False, **options}
    )
    return answer


def wait_until_empty(store: SessionStore) -> None:
    """Wait until the server has noticed that all sessions ended."""
    deadline = monotonic() + 10
    while len(store) and monotonic() < deadline:
        sleep(0.01)
    assert len(store) == 0


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_every_decoding_mode_equal_those_of_the_model(name: str) -> None:
    model, at = build(name)
    modes = [mode for mode in MODES if name not in ("mamba", "qwen3_next") or mode in ("greedy", "sampling", "beams")]
    with (
        serve(model, EXAMPLE_IDS, listen="127.0.0.1:0") as server,
        mt.connect(model, EXAMPLE_IDS, server.address, at=at, fallback=None) as remote,
    ):
        for mode in modes:
            rows = 1 if mode == "prompt lookup" else 2
            assert tokens(remote, rows=rows, **MODES[mode]).equal(tokens(model, rows=rows, **MODES[mode])), mode
        assert {record.where for record in remote.requests} == {"cloud"}


@pytest.mark.parametrize("at", ["model.embed_tokens", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"])
def test_a_cut_may_lie_inside_of_a_block(llama: Any, server: Server, at: str) -> None:
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=at, fallback=None) as remote:
        assert tokens(remote, num_beams=2).equal(tokens(llama, num_beams=2))


def test_an_encoder_decoder_generates_the_same() -> None:
    model, example = build_t5(), {"input_ids": IDS, "decoder_input_ids": IDS[:, :1]}
    with (
        serve(model, example, listen="127.0.0.1:0") as server,
        mt.connect(model, example, server.address, at="decoder.block.1", fallback=None) as remote,
    ):
        assert tokens(remote, num_beams=2).equal(tokens(model, num_beams=2))


def test_the_output_of_an_encoder_is_sent_once() -> None:
    model, prompt = build_t5(), torch.arange(1, 65)[None] % VOCABULARY
    example = {"input_ids": prompt, "decoder_input_ids": prompt[:, :1]}
    with (
        serve(model, example, listen="127.0.0.1:0") as server,
        mt.connect(model, example, server.address, at="decoder.block.0", codec="raw", fallback=None) as remote,
    ):
        options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        for ids in (prompt, prompt.flip(1)):  # another prompt has another output
            remote.requests.clear()
            assert remote.generate(ids, **options).equal(model.generate(ids, **options))
            first, *later = (record.sent_bytes for record in remote.requests)
            encoder = 64 * model.config.d_model * 4
            assert first > encoder
            assert max(later[1:]) < encoder / 4  # the bias of 64 positions, a hidden state, and what describes them


@torch.no_grad()
def test_an_input_that_changes_in_place_is_sent_again() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(512, 512), nn.Linear(512, 512)

        def forward(self, x: torch.Tensor, memory: Memory) -> dict[str, Any]:
            memory.steps += 1
            return {"out": self.last(self.first(x) + x) * memory.steps, "memory": memory}

    torch.manual_seed(0)
    model, x = Net().eval(), torch.ones(1, 512)
    example = {"x": x, "memory": Memory(0)}
    whole, memory = Memory(0), Memory(0)
    with (
        serve(model, example, listen="127.0.0.1:0") as server,
        mt.connect(model, example, server.address, at="first", codec="raw", fallback=None) as remote,
        remote.session() as session,
    ):
        for step in range(4):
            if step == 2:
                x.data.mul_(2)  # which increments no version counter
            output = session(x=x, memory=memory)
            memory = output["memory"]
            assert output["out"].equal(model(x=x, memory=whole)["out"])
        sent = [record.sent_bytes for record in remote.requests][-4:]
    assert [nbytes > 2 * x.nbytes for nbytes in sent] == [True, False, True, False]


@torch.no_grad()
def test_an_input_that_the_state_keeps_and_writes_to_is_refused() -> None:
    width = 512

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: torch.Tensor, side: torch.Tensor, memory: Memory) -> dict[str, Any]:
            y = self.last(self.first(x) + side)
            memory.steps += 1
            if memory.kept[0] is None:
                memory.kept[0] = side
            elif memory.steps > 2:  # not on the example, of two steps
                memory.kept[0].mul_(2)
            return {"out": y * memory.steps, "memory": memory}

    model, x, memory = Net().eval(), torch.ones(1, width), Memory(1)
    example = {"x": x, "side": torch.ones(1, width), "memory": Memory(1)}
    with (
        serve(model, example, listen="127.0.0.1:0") as server,
        mt.connect(model, example, server.address, at="first", codec="raw", fallback=None) as remote,
        remote.session() as session,
    ):
        for _ in range(3):
            memory = session(x=x, side=torch.ones(1, width), memory=memory)["memory"]
        with pytest.raises(RemoteError, match="modified input 'side' in place, and not on the example"):
            session(x=x, side=torch.ones(1, width), memory=memory)


@torch.no_grad()
def test_repeated_inputs_are_there_when_a_session_is_replayed() -> None:
    model, prompt = build_t5(), torch.arange(1, 65)[None] % VOCABULARY
    example = {"input_ids": prompt, "decoder_input_ids": prompt[:, :1]}
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    expected = model.generate(prompt, **options)
    with (
        serve(model, example, listen="127.0.0.1:0", sessions=1) as server,
        mt.connect(model, example, server.address, at="decoder.block.0", fallback=None) as remote,
        mt.connect(model, example, server.address, at="decoder.block.0", fallback=None) as other,
    ):

        class Evict:
            """A streamer that lets another session take the place of this one after some tokens."""

            def put(self, value: Any) -> None:
                if len(remote.requests) in (4, 7):
                    other.generate(prompt, max_new_tokens=1, do_sample=False)

            def end(self) -> None: ...

        assert remote.generate(prompt, **options, streamer=Evict()).equal(expected)
        assert len(remote.requests) > 10  # some steps were replayed


@pytest.mark.slow
def test_speech_is_transcribed_the_same() -> None:
    model, sound = build_whisper(), torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    example = {"input_features": sound, "decoder_input_ids": IDS[:, :1]}
    with (
        serve(model, example, listen="127.0.0.1:0") as server,
        mt.connect(model, example, server.address, at="model.decoder.layers.1", fallback=None) as remote,
    ):
        answers = [one.generate(sound, max_new_tokens=10, do_sample=False) for one in (model, remote)]
        assert answers[0].equal(answers[1])


@torch.no_grad()
def test_logits_of_each_step_are_bit_equal(llama: Any, server: Server) -> None:
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT) as remote, remote.session() as chat:
        inputs: list[dict[str, Any]] = [{"input_ids": IDS}, {"input_ids": IDS}]
        for _ in range(20):
            whole, split = llama(**inputs[0]), chat(**inputs[1])
            assert split.logits.equal(whole.logits)
            token = whole.logits[:, -1:].argmax(-1)
            inputs = [{"input_ids": token, "past_key_values": one.past_key_values} for one in (whole, split)]
        assert chat.num_steps == 20
        assert split.past_key_values.get_seq_length() == 28
        assert isinstance(server.served, ServedModel)
        assert len(server.served._tails) == 1  # one analysis serves all steps


@torch.no_grad()
def test_a_single_pass_returns_the_cache_as_placeholders(llama: Any, server: Server) -> None:
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT) as remote:
        output, expected = remote(**EXAMPLE_IDS), llama(**EXAMPLE_IDS)
    assert output.logits.equal(expected.logits)
    cache = output.past_key_values.layers
    assert cache[0].keys.equal(expected.past_key_values.layers[0].keys)
    assert "written by another stage" in repr(cache[2].keys)


@torch.no_grad()
def test_no_tensor_of_the_cache_crosses_and_steps_are_short(llama: Any, server: Server) -> None:
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT, codec="raw") as remote:
        tokens(remote, 30)
        sent = [record.sent_bytes for record in remote.requests][2:]
    mask = 2 * 39 * 8  # an input, which the masks of the tail are computed from
    assert max(sent) <= 2 * 32 * 4 + mask + 400  # a hidden state of each row; what describes it, padding, checksums


@pytest.mark.parametrize("at", ["layers.0", "layers.1.inner", "layers.3"])
@torch.no_grad()
def test_state_of_any_class_stays_on_its_side(at: str) -> None:
    torch.manual_seed(0)
    model = Model().eval()
    with (
        serve(model, EXAMPLE, listen="127.0.0.1:0") as server,
        mt.connect(model, EXAMPLE, server.address, at=at, fallback=None) as remote,
        remote.session() as session,
    ):
        outputs, memory = run(session, STEPS)
        expected, _ = run(model, STEPS)
        assert all(map(torch.equal, outputs, expected))
        assert memory.steps == 4


def test_the_edge_alone_generates_if_the_model_is_not_cut(llama: Any, server: Server) -> None:
    with mt.connect(llama, EXAMPLE_IDS, server.address, at="auto") as remote:
        assert tokens(remote, 5).equal(tokens(llama, 5))


# -- several sessions --------------------------------------------------------------------------------------------------


def interleave(model: Any, sessions: list[Any], steps: int) -> None:
    """Run conversations of other batch sizes and lengths, a token of each in turn, and compare the logits."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, VOCABULARY, (1 + n % 3, 5 + 2 * n), generator=generator) for n in range(len(sessions))]
    inputs: list[list[dict[str, Any]]] = [[{"input_ids": one}, {"input_ids": one}] for one in ids]
    for _ in range(steps):
        for number, session in enumerate(sessions):
            whole, split = model(**inputs[number][0]), session(**inputs[number][1])
            assert split.logits.equal(whole.logits)
            token = whole.logits[:, -1:].argmax(-1)
            both = [{"input_ids": token, "past_key_values": one.past_key_values} for one in (whole, split)]
            inputs[number] = both


@torch.no_grad()
def test_eight_conversations_are_independent(llama: Any, server: Server) -> None:
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT, fallback=None) as remote:
        sessions = [remote.session() for _ in range(8)]
        interleave(llama, sessions, 6)
        assert sum(one.replays for one in sessions if isinstance(one, RemoteSession)) == 0
        for session in sessions:
            session.close()


@torch.no_grad()
def test_a_session_that_was_evicted_is_replayed(llama: Any) -> None:
    with (
        serve(llama, EXAMPLE_IDS, listen="127.0.0.1:0", sessions=2) as server,
        mt.connect(llama, EXAMPLE_IDS, server.address, at=AT, fallback=None) as remote,
    ):
        sessions = [remote.session() for _ in range(3)]
        interleave(llama, sessions, 4)
        assert sum(one.replays for one in sessions if isinstance(one, RemoteSession)) >= 3
        text = generate_latest(server.metrics.registry).decode()
        assert "microtome_sessions 2.0" in text
        assert 'microtome_ended_sessions_total{reason="evicted"}' in text


@torch.no_grad()
def test_sessions_end_with_the_client(llama: Any, server: Server) -> None:
    assert server._service is not None
    store = server._service.sessions
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT) as remote:
        with remote.session() as chat:
            chat(input_ids=IDS)
            assert len(store) >= 1
            assert store.nbytes > 0
        chat = remote.session()
        chat(input_ids=IDS)
    wait_until_empty(store)
    assert store.nbytes == 0


# -- faults ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_edge_finishes_alone_if_the_server_dies(llama: Any) -> None:
    expected = tokens(llama, num_beams=2)
    server = serve(llama, EXAMPLE_IDS, listen="127.0.0.1:0")
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT) as remote:
        stop = _Stopper(server, after=7)
        answer = tokens(remote, num_beams=2, logits_processor=[stop])
        assert answer.equal(expected)
        assert {record.where for record in remote.requests} >= {"cloud", "edge"}
    server.stop(0)


class _Stopper:
    """A logits processor that stops a server before a token."""

    def __init__(self, server: Server, after: int) -> None:
        self.server, self.left = server, after

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.server.stop(0)
        return scores


@torch.no_grad()
def test_a_server_that_is_back_goes_on(llama: Any) -> None:
    server = serve(llama, EXAMPLE_IDS, listen="127.0.0.1:0")
    address = server.address
    with mt.connect(llama, EXAMPLE_IDS, address, at=AT, fallback=None) as remote, remote.session() as chat:
        output = chat(input_ids=IDS)
        expected = llama(input_ids=IDS)
        for step in range(6):
            if step % 2:
                server.stop(0)
                server = serve(llama, EXAMPLE_IDS, listen=address)
            token = expected.logits[:, -1:].argmax(-1)
            output = chat(input_ids=token, past_key_values=output.past_key_values)
            expected = llama(input_ids=token, past_key_values=expected.past_key_values)
            assert output.logits.equal(expected.logits)
        assert isinstance(chat, RemoteSession)
        assert chat.replays == 3
    server.stop(0)


@torch.no_grad()
def test_a_session_too_long_to_be_replayed_says_so(llama: Any) -> None:
    server = serve(llama, EXAMPLE_IDS, listen="127.0.0.1:0")
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT) as remote:
        chat = remote.session(replay_memory="1kB")
        output = chat(input_ids=IDS)
        server.stop(0)
        with pytest.raises(RemoteError, match=r"took .*, and 1,000 B are kept for a replay: raise replay_memory="):
            chat(input_ids=IDS[:, :1], past_key_values=output.past_key_values)


@torch.no_grad()
def test_a_state_with_values_does_not_cross(llama: Any, server: Server) -> None:
    cache = llama(input_ids=IDS).past_key_values
    with (
        mt.connect(llama, EXAMPLE_IDS, server.address, at=AT) as remote,
        remote.session() as chat,
        pytest.raises(Unsupported, match=r"expected a new DynamicCache for a session on a server, got one with values"),
    ):
        chat(input_ids=IDS[:, :1], past_key_values=cache)


@torch.no_grad()
def test_an_edit_that_a_server_does_not_repeat_is_refused(llama: Any, server: Server) -> None:
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT) as remote, remote.session() as chat:
        cache = chat(input_ids=IDS).past_key_values
        cache.layers[2].keys = cache.layers[2].keys * 2
        with pytest.raises(Unsupported, match=r"\.layers\[2\]\.keys was edited between two steps by aten::mul"):
            chat(input_ids=IDS[:, :1], past_key_values=cache)


@torch.no_grad()
def test_the_inputs_cannot_cross_in_a_session(llama: Any, server: Server) -> None:
    with (
        mt.connect(llama, EXAMPLE_IDS, server.address, at="(input)") as remote,
        pytest.raises(Unsupported, match=r"expected a cut at a layer for a session, got '\(input\)'"),
    ):
        remote.session()


def test_a_server_may_keep_no_sessions(llama: Any) -> None:
    with (
        serve(llama, EXAMPLE_IDS, listen="127.0.0.1:0", sessions=0) as server,
        pytest.raises(RemoteError, match="keeps no sessions"),
    ):
        mt.connect(llama, EXAMPLE_IDS, server.address, at=AT)


@torch.no_grad()
def test_a_state_over_the_budget_is_computed_here(llama: Any) -> None:
    with serve(llama, EXAMPLE_IDS, listen="127.0.0.1:0", state_memory="12kB") as server:
        with (
            mt.connect(llama, EXAMPLE_IDS, server.address, at=AT, fallback=None) as remote,
            pytest.raises(RemoteError, match="raise --state-memory"),
        ):
            tokens(remote, 60)
        with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT) as remote:
            assert tokens(remote, 60).equal(tokens(llama, 60))
            assert remote.requests[-1].where == "edge"


# -- the store ---------------------------------------------------------------------------------------------------------


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_belongs_to_its_stream_and_its_steps_are_in_order() -> None:
    store, mine, other = SessionStore(SessionLimits(), Metrics()), object(), object()
    with store.step(mine, "a", 0):
        pass
    with pytest.raises(NoSession, match="the session 'a' has ended"), store.step(other, "a", 1):
        pass
    with store.step(mine, "a", 1):
        pass
    with pytest.raises(NoSession, match="expected step 2 of the session, got 1"), store.step(mine, "a", 1):
        pass
    assert len(store) == 0  # a step that is computed twice would write twice


def test_the_least_recently_used_session_ends_first() -> None:
    clock = _Clock()
    store, owner = SessionStore(SessionLimits(number=2, idle_s=10), Metrics(), clock), object()
    for name, number in (("a", 0), ("b", 0), ("a", 1), ("c", 0)):
        with store.step(owner, name, number):
            clock.now += 1
    with pytest.raises(NoSession), store.step(owner, "b", 1):
        pass
    with store.step(owner, "a", 2):
        clock.now += 11
    store.expire()
    assert len(store) == 1  # c was idle for longer than 10 s
    store.end_all(owner)
    assert len(store) == 0


def test_an_error_ends_a_session() -> None:
    store, owner = SessionStore(SessionLimits(), Metrics()), object()
    with pytest.raises(ZeroDivisionError), store.step(owner, "a", 0):
        raise ZeroDivisionError
    with pytest.raises(NoSession), store.step(owner, "a", 1):
        pass


def test_all_sessions_may_be_computing() -> None:
    store, owner = SessionStore(SessionLimits(number=1), Metrics()), object()
    message = "all 1 sessions are computing"
    with store.step(owner, "a", 0), pytest.raises(StateTooLarge, match=message), store.step(owner, "b", 0):
        pass


# -- messages ----------------------------------------------------------------------------------------------------------


def test_fields_of_steps_are_compressed_relative_to_the_last() -> None:
    sender, receiver = DeltaCodec(), DeltaCodec()
    fields = [json.dumps({"step": number, "shapes": list(range(500))}).encode() for number in range(4)]
    sizes = []
    for field in fields:
        sent = sender.compress("header", field)
        assert receiver.decompress("header", sent) == field
        sizes.append(len(sent))
    assert max(sizes[1:]) < sizes[0] / 10


@pytest.mark.parametrize(
    ("parse", "message"),
    [
        (lambda: DeltaCodec().decompress("state", b"no zlib"), "cannot decompress the state of a step"),
        (
            lambda: DeltaCodec().decompress("state", DeltaCodec().compress("state", bytes(5 << 20))),
            "expected at most 4194304 bytes in the state",
        ),
        (lambda: parse_edits(b"[[]]", 2), "expected the edits of 2 state objects"),
        (lambda: parse_edits(b"nonsense", 1), "expected edits of state objects in JSON"),
        (lambda: parse_split(b'{"at": 3}'), "invalid description of a split"),
        (lambda: parse_states(b'[{"state": "os.system", "parts": []}]', Model()), "expected a class of inputs from"),
        (lambda: parse_states(b"[1]", Model()), "invalid state objects"),
        (
            lambda: parse_edits(_edit("aten::from_file", [{"value": "/etc/passwd", "kind": "value"}]), 1),
            "expected an operator that edits a state, got 'aten::from_file'",
        ),
    ],
)
def test_damaged_and_hostile_fields_are_refused(parse: Any, message: str) -> None:
    with pytest.raises(BadBoundary, match=message):
        parse()


def _edit(operator: str, args: list[Any], path: Any = ("kept", 3)) -> bytes:
    item = {"shape": [1], "dtype": "float32", "requires_grad": False, "kind": "placeholder"}
    op = {"operator": operator, "overload": "default", "args": args, "kwargs": {}}
    return json.dumps([[{"change": {"path": list(path), "item": item}, "ops": [op]}]]).encode()


@torch.no_grad()
def test_an_edit_cannot_fill_the_memory_of_a_server() -> None:
    torch.manual_seed(0)
    model = Model().eval()
    head, tail = mt.split(model, EXAMPLE, at="layers.1")
    session, memory = TailSession(), Memory(4)
    boundary = head(STEPS[0], memory=memory)
    with as_state(tail.spec.state_classes):
        states = encode_states([Memory(4)])
    session.run(tail, states, boundary)
    for count, error, message in (
        (1 << 8, TooLarge, "expected edits of the state to at most 1.00 MiB, got"),
        (1 << 20, BadBoundary, "cannot edit the state as the client did: .* overflow"),
    ):
        repeats = {"items": [{"value": count, "kind": "value"}] * 3, "kind": "list"}
        with pytest.raises(error, match=message):
            session.run(tail, _edit("aten::repeat", [repeats]), boundary, 1 << 20)


def test_a_step_cannot_be_sent_as_a_unary_call(llama: Any, server: Server) -> None:
    request = protocol.Request(id="1", step=protocol.Step(session="a"))
    with grpc.insecure_channel(server.address) as channel:
        method = channel.unary_unary(protocol.METHODS["Run"].path)
        with pytest.raises(grpc.RpcError, match="got a step of a session: send it on a Stream"):
            method(request.SerializeToString(), timeout=10)


# -- processes ---------------------------------------------------------------------------------------------------------


def _start(side: str, *arguments: str, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.remote.generating_process", side, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(seed)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_two_processes_with_half_the_weights_and_other_hash_seeds(name: str, tmp_path: Path) -> None:
    model, at = build(name)
    expected = tokens(model, num_beams=2)
    stages = mt.split(model, EXAMPLE_IDS, at=at)
    assert tokens(stages, 3, num_beams=2).shape[1] == 12  # so that the stages of its steps are saved, too
    stages.save(tmp_path)
    for seeds in ((1, 2), (2, 1)):
        with _start("tail", name, str(tmp_path), seed=seeds[0]) as server:
            try:
                assert server.stdout is not None
                address = server.stdout.readline().strip()
                head = _start("head", name, str(tmp_path), address, seed=seeds[1])
                answer, _ = head.communicate(timeout=240)
                assert head.returncode == 0
                assert json.loads(answer) == expected.tolist()
            finally:
                server.kill()


@pytest.mark.slow
@pytest.mark.integration
@torch.no_grad()
def test_a_server_that_is_killed_at_random_tokens_changes_no_answer() -> None:
    """`python -m tests.remote.generating_process kills 50` runs more."""
    assert run_kills(6) == {"right": 6, "wrong": 0}


def test_mutated_steps_are_refused_and_other_sessions_go_on() -> None:
    """`python -m tests.remote.session_fuzz --steps 20000` sends more."""
    found = fuzz(600, seed=3)
    assert found.outcomes["BAD_REQUEST"] > 50
    assert found.outcomes["output"] > 50
    assert not found.unexpected


# -- several threads, deadlines, modes ---------------------------------------------------------------------------------


@torch.no_grad()
def test_another_split_of_one_client_does_not_disturb_the_steps_of_another(llama: Any) -> None:
    expected = tokens(llama, 60)
    with (
        serve(copy.deepcopy(llama), EXAMPLE_IDS, listen="127.0.0.1:0", concurrency=2) as server,
        mt.connect(llama, EXAMPLE_IDS, server.address, at=AT, fallback=None) as remote,
        ThreadPoolExecutor(2) as pool,
    ):
        tokens(remote, 3)
        answers = [pool.submit(tokens, remote, 60) for _ in range(2)]
        another = copy.deepcopy(llama)  # a process of its own would have one
        for at in ("model.layers.0", "model.embed_tokens", "model.layers.0.mlp"):
            with mt.connect(another, EXAMPLE_IDS, server.address, at=at, fallback=None) as other:
                assert tokens(other, 3).equal(expected[:, :12])
        assert all(answer.result().equal(expected) for answer in answers)


@torch.no_grad()
def test_more_conversations_than_sessions_at_once_all_end_right(llama: Any) -> None:
    expected = tokens(llama, 8)
    with (
        serve(copy.deepcopy(llama), EXAMPLE_IDS, listen="127.0.0.1:0", sessions=2) as server,
        mt.connect(llama, EXAMPLE_IDS, server.address, at=AT, fallback=None) as remote,
        ThreadPoolExecutor(3) as pool,
    ):
        tokens(remote, 3)  # so that no thread analyzes the model
        answers = [pool.submit(tokens, remote, 8) for _ in range(3)]
        assert all(answer.result().equal(expected) for answer in answers)


@torch.no_grad()
def test_a_short_deadline_does_not_end_the_warm_up(llama: Any, server: Server) -> None:
    local = copy.deepcopy(llama)  # the server goes on with a request that nobody waits for
    expected = tokens(local, 5)
    with mt.connect(local, EXAMPLE_IDS, server.address, at=AT, deadline="1ms") as remote:
        assert not remote.requests
        assert tokens(remote, 5).equal(expected)
        assert remote.requests[-1].where == "edge"


@torch.no_grad()
def test_a_session_ends_on_the_server_after_an_error_here(llama: Any, server: Server) -> None:
    assert server._service is not None
    store = server._service.sessions
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT) as remote:
        with remote.session() as chat:
            output = chat(input_ids=IDS)
            with pytest.raises(IndexError):  # the embedding has no such row
                chat(input_ids=IDS[:, :1] + 10**6, past_key_values=output.past_key_values)
        wait_until_empty(store)


@torch.no_grad()
def test_views_of_large_tensors_count_as_these(llama: Any) -> None:
    with (
        serve(llama, EXAMPLE_IDS, listen="127.0.0.1:0", state_memory="1MB") as server,
        mt.connect(llama, EXAMPLE_IDS, server.address, at=AT, fallback=None) as remote,
        remote.session() as chat,
    ):
        cache = chat(input_ids=IDS).past_key_values
        layer = cache.layers[2]
        layer.keys = layer.keys.repeat(4000, 1, 1, 1)[:2]
        with pytest.raises(RemoteError, match=r"expected edits of the state to at most|raise --state-memory"):
            chat(input_ids=IDS[:, :1], past_key_values=cache)


@torch.no_grad()
def test_autocast_and_training_mode_are_refused(llama: Any, server: Server) -> None:
    with mt.connect(llama, EXAMPLE_IDS, server.address, at=AT) as remote, remote.session() as chat:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(Unsupported, match="expected no autocast around"):
            chat(input_ids=IDS)
        llama.train()
        try:
            with pytest.raises(Unsupported, match="expected the model in eval mode, as when it was split"):
                remote(input_ids=IDS)
        finally:
            llama.eval()


@torch.no_grad()
def test_stages_saved_after_a_static_cache_can_be_loaded(llama: Any, tmp_path: Path) -> None:
    stages = mt.split(llama, EXAMPLE_IDS, at=AT)
    tokens(stages, 3, cache_implementation="static")
    tokens(stages, 3)
    stages.save(tmp_path)
    head, tail = (mt.load_stage(lambda: build("llama")[0], tmp_path, index) for index in (0, 1))
    with (
        serve(tail, listen="127.0.0.1:0") as server,
        mt.connect(head, None, server.address) as remote,
    ):
        assert tokens(remote, 5).equal(tokens(llama, 5))


@torch.no_grad()
def test_a_named_state_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Lazy().eval()
    step = STEPS[1]
    mt.split(model, mt.Inputs(step, memory=Memory(3)), at="layers.1", state="memory").save(tmp_path)
    head, tail = (mt.load_stage(Lazy, tmp_path, index) for index in (0, 1))
    assert len(head.spec.states) == len(tail.spec.states) == 1


@torch.no_grad()
def test_a_loaded_head_names_the_steps_that_were_not_saved(llama: Any, tmp_path: Path) -> None:
    mt.split(llama, EXAMPLE_IDS, at=AT).save(tmp_path)
    head, tail = (mt.load_stage(lambda: build("llama")[0], tmp_path, index) for index in (0, 1))
    with (
        serve(tail, listen="127.0.0.1:0") as server,
        mt.connect(head, None, server.address) as remote,
        pytest.raises(Unsupported, match=r"the stages were not saved for steps that are called with .*attention_mask"),
    ):
        tokens(remote, 3)
