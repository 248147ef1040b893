"""`microtome ping`, `microtome run` and `microtome sweep`, against a server in this process."""

from __future__ import annotations

import csv
import io
import json
import re
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.remote.server import Server
from microtome.report.formats import text
from microtome.results.requests import RequestLog
from microtome.results.sweep import Sweep
from tests.remote.process import ServerProcess
from tests.remote.proxy import Proxy, Weather
from tests.report.timed import check_chrome

MODEL = "zoo:tiny-resnet"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with mt.serve(*zoo.build("tiny-resnet"), listen="127.0.0.1:0") as server:
        yield server


@pytest.fixture(scope="module")
def second() -> Iterator[Server]:
    with mt.serve(*zoo.build("tiny-resnet"), listen="127.0.0.1:0") as server:
        yield server


@pytest.fixture(name="data")
def make_data(tmp_path: Path) -> Path:
    file = tmp_path / "x.npy"
    np.save(file, np.random.default_rng(0).standard_normal((7, 3, 32, 32)))
    return file


def call(*words: Any) -> Result:
    return CliRunner().invoke(main, [*map(str, words)])


def good(*words: Any) -> Result:
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result


# -- ping --------------------------------------------------------------------------------------------------------------


def test_ping_says_who_answers_and_how_fast_the_way_is(server: Server) -> None:
    output = good("ping", server.address).output
    assert f"{server.address} serves ResNet on cpu" in output
    for words in (
        f"microtome {mt.__version__}, torch {torch.__version__}, protocol 1",
        "raw, zstd",
        "(input), ",
        "11.1 k",
    ):
        assert words in output
    assert re.search(r"round trip +\S+ (ms|us) min / \S+ (ms|us) median", output)
    assert re.search(r"bandwidth +\S+ [MG]bps up / \S+ [MG]bps down", output)
    assert f"{len(server.served.cuts)}: " in output
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--server {0} --at auto --at layer2", "'auto' chooses one cut, and cannot be among others"),
        ("--server {0} --server {0}", "expected 2 cuts for 2 servers, got at='auto', which chooses one"),
    ],
)
def test_an_automatic_cut_beside_others_is_refused_with_the_option(server: Server, words: str, message: str) -> None:
    result = call("run", MODEL, *words.format(server.address).split())
    assert result.exit_code == 2
    assert message in result.output
    assert "name every cut, each with --at, or use one server" in result.output


@pytest.mark.filterwarnings("default:left out")
def test_a_server_that_is_down_at_the_start_is_named_once(server: Server) -> None:
    result = good("run", MODEL, "--server", f"{server.address},127.0.0.1:1", "--at", "layer1", "--repeat", 3)
    assert result.stderr.count("127.0.0.1:1 cannot be reached") == 1
    assert "Warning: left out until it is back: 127.0.0.1:1 cannot be reached" in result.stderr


def test_ping_of_a_port_of_another_program_names_it() -> None:
    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        result = call("ping", f"127.0.0.1:{other.server_port}")
        other.shutdown()
        thread.join()
    assert result.exit_code == 2
    assert (
        "cannot be reached: another program listens there, which does not use gRPC. Is the port right?" in result.output
    )
    assert "HTTP/2" not in result.output


def test_ping_writes_json(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "ping.json"
    good("ping", server.address, "--json", file)
    found = json.loads(file.read_text())
    assert found["cuts"] == list(server.served.cuts)
    assert (found["fingerprint"], found["params"]) == (server.served.fingerprint, server.served.params)
    assert 0 < found["rtt_s"] <= found["rtt_median_s"]
    assert json.loads(good("ping", server.address, "--json", "-").stdout)["model"] == "ResNet"


def test_a_token_is_shown_where_the_server_wants_one(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("secret\n")
    wrong.write_text("guess\n")
    with mt.serve(*zoo.build("tiny-resnet"), listen="127.0.0.1:0", token="secret") as guarded:
        good("ping", guarded.address, "--token-file", right)
        good("run", MODEL, "--server", guarded.address, "--at", "layer1", "--repeat", 2, "--token-file", right)
        for words, problem in (
            (["--token-file", wrong], "rejects the token: pass that of the server with --token-file"),
            ([], "requires a token: pass it with --token-file"),
        ):
            for command in (["ping", guarded.address], ["run", MODEL, "--server", guarded.address]):
                result = call(*command, *words, "--timeout", 5)
                assert result.exit_code == 2
                assert problem in result.output


# -- run ---------------------------------------------------------------------------------------------------------------


def test_data_goes_through_and_outputs_are_written(server: Server, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    words = ["--data", data, "--batch", 3, "--at", "layer1", "--codec", "raw", "--to", out]  # auto depends on the load
    result = good("run", MODEL, "--server", server.address, *words)
    assert "cut at layer1: 3 requests of 2.33 samples in" in result.output
    assert f"written: {out} (" in result.stderr
    model, _ = zoo.build("tiny-resnet")
    with torch.no_grad():
        whole = model(torch.from_numpy(np.load(data)).float())
    assert torch.allclose(load_file(out)["output"], whole, atol=1e-5)


def test_a_folder_gets_a_file_for_each_request_and_is_not_written_over(server: Server, tmp_path: Path) -> None:
    words = ["run", MODEL, "--server", server.address, "--at", "", "--repeat", 3, "--to", tmp_path / "out"]
    assert f"written: {tmp_path / 'out'} (3 files, " in good(*words).stderr
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["000000.safetensors", "000001.safetensors", "000002.safetensors"]
    model, x = zoo.build("tiny-resnet")
    with torch.no_grad():
        assert load_file(files[2])["output"].equal(model(x))
    again = call(*words)
    assert again.exit_code == 2
    assert "already contains .safetensors files" in again.output


def test_every_request_is_in_the_json_and_the_csv(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    good("run", MODEL, "--server", server.address, "--at", "layer1", "--repeat", 5, "--window", 2, "--json", file)
    ran = mt.load(file)
    assert isinstance(ran, RequestLog)
    assert [(sent.at, sent.where) for sent in ran.requests] == [("layer1", "cloud")] * 5
    assert ran.samples == 10
    middle = ran.phases()["tail"]
    assert middle is not None
    assert 0 < middle.median <= middle.p95
    summary = json.loads(file.read_text())["summary"]
    assert summary["requests"] == 5
    assert summary["on_edge"] == 0
    shown = good("run", MODEL, "--server", server.address, "--at", "layer1", "--repeat", 2, "--csv", "-").stdout
    rows = list(csv.DictReader(io.StringIO(shown)))
    assert [row["where"] for row in rows] == ["cloud"] * 2


def test_the_summary_fits_and_names_every_phase(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = good("run", MODEL, "--server", server.address, "--at", "layer1", "--repeat", 3).output
    for phase in ("head", "encode", "wire", "queue", "tail", "decode", "total", "sent", "received"):
        assert re.search(rf"^{phase} +│", output, re.MULTILINE), phase
    assert "energy" in output
    assert max(map(len, output.splitlines())) <= 80


def test_what_ended_here_is_said_with_the_reason(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = ["--at", "", "--deadline", "0.0001", "--repeat", 4, "--window", 1, "--json", file]
    shown = good("run", MODEL, "--server", server.address, *words).output
    ran = mt.load(file)
    kept = len(ran.on_edge)
    assert kept
    assert sum(ran.reasons.values()) == kept
    assert f"{kept} request{'s' if kept > 1 else ''} of 4 ended here" in shown
    assert "answer" in next(iter(ran.reasons))
    assert "tail here" in text(ran)


def test_the_cut_is_found_and_the_choice_is_told(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    output = good("run", MODEL, "--server", server.address, "--repeat", 4, "--json", file).output
    moves = mt.load(file).moves
    assert moves
    assert "planned: " in output


def test_the_first_stage_alone_is_enough(server: Server, tmp_path: Path) -> None:
    good("split", MODEL, "--at", "layer1", "--to", tmp_path / "parts")
    file = tmp_path / "run.json"
    words = ["--stages", tmp_path / "parts", "--repeat", 2, "--json", file]
    good("run", MODEL, "--server", server.address, *words)
    assert [sent.at for sent in mt.load(file).requests] == ["layer1"] * 2
    other = call("run", MODEL, "--server", server.address, *words, "--at", "layer2")
    assert other.exit_code == 2
    assert "this client has the stage up to 'layer1' alone" in other.output


# -- chains ------------------------------------------------------------------------------------------------------------


def outputs_of(data: Path, to: Path) -> torch.Tensor:
    model, _ = zoo.build("tiny-resnet")
    with torch.no_grad():
        expected: torch.Tensor = model(torch.from_numpy(np.load(data)).float())
    written = load_file(to)
    assert torch.cat([written[name] for name in sorted(written)]).equal(expected)
    return expected


def test_a_chain_runs_over_two_servers_and_each_stage_has_a_row(
    server: Server, second: Server, data: Path, tmp_path: Path
) -> None:
    cuts = "--at", "stem", "--at", "layer1.0.relu#0"
    chain = "--server", server.address, "--server", f"{second.address},{server.address}"
    to = tmp_path / "y.safetensors"
    files = "--to", to, "--json", tmp_path / "r.json", "--csv", tmp_path / "r.csv"
    result = good("run", MODEL, *cuts, *chain, "--data", data, "--batch", 7, *files)
    outputs_of(data, to)
    assert f"at {server.address} → {second.address}, {server.address} (cpu)" in result.output
    assert "cut at stem → layer1.0.relu#0" in result.output
    for row in ("from stem", "from layer1.0.relu#0"):
        assert re.search(rf"^  {re.escape(row)} +│ +\S+ [mu]s", result.output, re.MULTILINE)
    log = mt.load(tmp_path / "r.json")
    assert [hop.at for hop in log.requests[0].hops] == ["stem", "layer1.0.relu#0"]
    assert text(log) in result.output
    (sent,) = csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text()))
    assert sent["at"] == "stem → layer1.0.relu#0"
    assert sent["server from stem"] == server.address
    hops = [float(sent[f"run_s from {at}"]) for at in ("stem", "layer1.0.relu#0")]
    assert float(sent["tail_s"]) == pytest.approx(sum(hops))
    assert not {"hops", "later"} & sent.keys()


def test_the_first_and_the_last_stage_run_here_with_one_server_less(server: Server, data: Path, tmp_path: Path) -> None:
    to = tmp_path / "y.safetensors"
    words = "--at", "stem", "--at", "layer1", "--data", data, "--batch", 7, "--to", to
    result = good("run", MODEL, "--server", server.address, *words)
    outputs_of(data, to)
    assert "last stage here" in result.output


def test_a_server_of_a_middle_stage_needs_only_its_weights(data: Path, tmp_path: Path) -> None:
    parts, to = tmp_path / "parts", tmp_path / "y.safetensors"
    good("split", MODEL, "--at", "stem", "--at", "layer1", "--to", parts)
    with ServerProcess(MODEL, "--stages", str(parts), "--stage", "1") as middle:
        words = "--stages", parts, "--data", data, "--batch", 7, "--to", to
        result = good("run", MODEL, "--server", middle.address, *words)
        outputs_of(data, to)
        assert "cut at stem → layer1" in result.output
        result = call("run", MODEL, "--server", middle.address, "--at", "stem")
        assert result.exit_code == 2
        assert "serves the stage from 'stem' to 'layer1', not the one from 'stem' to '(output)'" in result.output
        assert re.search(r"cuts +1: stem, up to layer1\n", good("ping", middle.address).output)
        reply = json.loads(good("ping", middle.address, "--json", "-").stdout)
        assert (reply["cuts"], reply["any_stage"], reply["ends_at"]) == (["stem"], False, "layer1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--server", "SERVER", "--server", "SERVER", "--at", "stem"], "expected 1 server for 1 cut, got 2"),
        (["--server", "SERVER", "--server", "SERVER"], "expected 2 cuts for 2 servers, got at='auto'"),
        (["--server", "SERVER,nowhere", "--at", "stem"], "expected the address of a server such as host:7070"),
    ],
)
def test_a_chain_that_cannot_be_is_explained(server: Server, words: list[str], message: str) -> None:
    result = call("run", MODEL, *(word.replace("SERVER", server.address) for word in words))
    assert result.exit_code == 2
    assert message in result.output


def test_a_stage_needs_a_folder() -> None:
    result = call("serve", MODEL, "--stage", 1)
    assert result.exit_code == 2
    assert "--stage is the number of a stage in a folder: add --stages FOLDER" in result.output


# -- sweep -------------------------------------------------------------------------------------------------------------


def test_every_cut_is_measured_beside_no_cut_and_the_plan(server: Server, tmp_path: Path) -> None:
    files = tmp_path / "s.json", tmp_path / "s.csv", tmp_path / "s.html"
    words = ["--cuts", "layer1,pool", "--repeat", 3, "--json", files[0], "--csv", files[1], "--html", files[2]]
    output = good("sweep", MODEL, "--server", server.address, *words).output
    found = mt.load(files[0])
    assert isinstance(found, Sweep)
    assert [row.at for row in found] == ["", "layer1", "pool", None]
    assert all(row.failed is None and row.planned_s for row in found)
    assert f"{found.best.name} is the best" in output
    rows = list(csv.DictReader(io.StringIO(files[1].read_text())))
    assert [row["name"] for row in rows] == ["(input)", "layer1", "pool", "all here"]
    assert [row["best"] for row in rows].count("True") == 1
    page = files[2].read_text()
    assert page.startswith("<!doctype html>")
    assert "<script" not in page
    assert "http" not in page


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_line_of_table_or_chart_is_wider_than_the_terminal(
    server: Server, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    output = good("sweep", MODEL, "--server", server.address, "--repeat", 1).output
    assert max(map(len, output.splitlines())) <= columns
    assert "░ codec, wire, queue" in output


@pytest.mark.parametrize("at", ["(input)", ""])
def test_the_input_is_sent_at_the_name_that_tables_print(server: Server, at: str) -> None:
    words = ["--server", server.address, "--at", at, "--repeat", 2, "--codec", "raw"]
    assert ", cut at (input): 2 requests" in good("run", MODEL, *words).output
    with mt.connect(*zoo.build("tiny-resnet"), server.address, at=at) as remote:
        assert repr(remote).endswith(", cut at '(input)'>")


def test_the_input_is_swept_once_where_it_is_named(server: Server) -> None:
    words = ["--server", server.address, "--cuts", "(input), layer1", "--repeat", 1, "--csv", "-"]
    names = [line.partition(",")[0] for line in good("sweep", MODEL, *words).stdout.splitlines()[1:]]
    assert names == ["(input)", "layer1", "all here"]


def test_requests_fail_without_the_fallback(server: Server) -> None:
    with Proxy(server.address, lambda _: (Weather(), Weather(delay_s=0.1))) as slow:
        words = ["run", MODEL, "--server", slow.address, "--at", "layer1", "--deadline", "1us", "--repeat", 2]
        assert "2 requests of 2 ended here" in good(*words).output
        result = call(*words, "--no-fallback")
        assert result.exit_code == 2
        assert f"{slow.address} did not answer in 1e-06 s" in result.output


def test_a_warning_is_a_line_without_source_code(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = call("ping", "unresolvable.invalid:1", "--token-file", tmp_path / "token", "--timeout", "0.1")
    lines = result.stderr.strip().splitlines()
    assert lines[0].startswith("Warning: the token is sent to unresolvable.invalid:1 without TLS: anybody on the way")
    assert lines[0].endswith("Encrypt the connection with --tls or --ca")
    assert lines[1].startswith("Error: unresolvable.invalid:1 ")


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ping", "nowhere"], "expected the address of a server such as host:7070, got 'nowhere'"),
        (["ping", "127.0.0.1:1", "--timeout", "0.3"], "refused: nothing listens there. Is the server running"),
        (
            ["ping", "127.0.0.1:99999"],
            "expected the address of a server such as host:7070, got '127.0.0.1:99999': a port is less",
        ),
        (["ping", "{server}", "--tls"], "does not use TLS: start the server with --tls-cert, or leave out --tls, --ca"),
        (["ping", "{server}", "--ca", "/no/such.pem"], "--ca: cannot read '/no/such.pem': No such file"),
        (["ping", "{server}", "--ca", __file__], "--ca: expected a certificate in PEM format in '"),
        (["ping", "{server}", "--cert", __file__, "--key", __file__], "--cert: expected a certificate in PEM format"),
        (["ping", "{server}", "--cert", "a.pem"], "--cert and --key go together"),
        (["ping", "{server}", "--server-name", "x"], "add --tls or --ca"),
        (["ping", "{server}", "--token-file", "/no/such"], "cannot read '/no/such': No such file"),
        (["ping", "{server}", "--timeout", "0ms"], "expected a time of more than 0, such as 100ms or 2, in"),
        (["ping", "{server}", "--json", ""], "--json: expected the name of a file"),
        (["run", MODEL, "--server", "127.0.0.1:1", "--timeout", "0.3"], "127.0.0.1:1 cannot be reached"),
        (["run", MODEL], "Missing option '--server'"),
        (["run", MODEL, "--server", "{server}", "--at", "layer9"], "no module at path 'layer9'. Did you mean"),
        (["run", MODEL, "--server", "{server}", "--at", "layer1", "--codec", "zip"], "no codec 'zip'"),
        (["run", MODEL, "--server", "{server}", "--at", "layer1", "--data", "/no/x.npy"], "cannot read '/no/x.npy'"),
        (["run", MODEL, "--server", "{server}", "--at", "layer1", "--data", "{flat}"], "does not run on Inputs(1x5:"),
        (["run", MODEL, "--server", "{server}", "--at", "layer1", "--data", "{flat}"], "\n  in the call 'stem"),
        (["run", MODEL, "--server", "{server}", "--at", "", "--data", "{flat}"], "could not answer: RuntimeError"),
        (["run", MODEL, "--server", "{server}", "--data", "a", "--repeat", "2"], "choose one of --data and --repeat"),
        (["run", MODEL, "--server", "{server}", "--batch", "4"], "--batch is the batch of --data: of the example"),
        (["serve", MODEL, "--batch-window", "5ms"], "--batch-window is how long a batch waits for others: add --batch"),
        (["run", MODEL, "--server", "{server}", "--deadline", "0"], "expected a time of more than 0"),
        (["run", MODEL, "--server", "{server}", "--deadline", "soon"], "in seconds, got 'soon'"),
        (["run", MODEL, "--server", "{server}", "--device", "meta"], "--device meta: expected a device"),
        (
            ["run", MODEL, "--server", "{server}", "--device", "moon"],
            "--device moon: expected a device of this machine, cpu",
        ),
        (["run", MODEL, "--server", "{server}", "--stages", "/no/such"], "'/no/such' holds no split model"),
        (["run", MODEL, "--server", "{server}", "--at", "layer1", "--to", "/no/x.safetensors"], "there is no folder"),
        (
            ["run", "zoo:tiny-vit", "--server", "{server}", "--at", "norm"],
            "the structure of ViT with 45.3 k parameters here",
        ),
        (
            ["run", MODEL, "--server", "{server}", "--arg", "classes=4", "--at", "layer1"],
            "differ: the fingerprints",
        ),
        (["run", "zoo:tiny-decoder", "--server", "{server}", "--data", "{flat}"], "run others from Python"),
        (["sweep", MODEL, "--server", "{server}", "--cuts", "layer1,layer9"], "no module at path 'layer9'"),
        (["sweep", MODEL, "--server", "{server}", "--cuts", ""], "expected cuts of 'all', 'dominating', or addresses"),
        (["sweep", MODEL, "--server", "{server}", "--codec", "zip"], "no codec 'zip'"),
        (["sweep", MODEL, "--server", "{server}", "--repeat", "0"], "0 is not in the range x>=1"),
        (["sweep", MODEL, "--server", "{server}", "--html", "a", "--csv", "a"], "both write to 'a'"),
        (["sweep", MODEL, "--server", "127.0.0.1:1", "--timeout", "0.3"], "127.0.0.1:1 cannot be reached"),
    ],
)
def test_what_is_wrong_is_said_in_short(server: Server, words: list[str], message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.zeros((4, 5), dtype=np.float32))
    places = {"server": server.address, "flat": tmp_path / "flat.npy"}
    result = call(*(word.format(**places) for word in words))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output


# -- for trace viewers -------------------------------------------------------------------------------------------------


def test_requests_are_written_for_perfetto(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = ["--at", "layer1", "--repeat", 5, "--window", 3, "--perfetto", file]
    good("run", MODEL, "--server", server.address, *words)
    events = check_chrome(file.read_text())
    assert sum(event["ph"] == "s" for event in events) == 10  # there and back
    requests = [event["name"] for event in events if event["ph"] == "X" and event["name"].startswith("request")]
    assert sorted(requests) == [f"request {at}" for at in range(5)]


def test_a_sweep_is_written_for_perfetto(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    good("sweep", MODEL, "--server", server.address, "--cuts", "layer1", "--repeat", 2, "--perfetto", file)
    events = check_chrome(file.read_text())
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"(input)", "layer1", "all here"} <= names
