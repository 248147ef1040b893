"""Stages as a Ray Serve application on one node."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import microtome as mt
from microtome.errors import BadInputs, BadQuery, NoMatch, RemoteError, Unsupported
from microtome.remote.error_kinds import Late
from microtome.remote.inference_backend import EncodedOutput
from microtome.split.stages import Stages
from tests.remote.slow import Gate, Slow, asking
from tests.remote.test_security import Authority
from tests.scale.serve_cluster import Mixing, Net, logged_rows, make_net

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'microtome[ray]'")
pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOKEN = "secret"


class Deployed(NamedTuple):
    """A net of which both stages after the first cut are deployed, behind TLS and a token."""

    net: Net
    x: Tensor
    stages: Stages
    log: Path
    deployment: Any
    security: dict[str, Any]

    def connect(self, at: Any, **options: Any) -> Any:
        chosen = {"fallback": None, "codec": "raw", **self.security, **options}
        return mt.connect(self.net, self.x, self.deployment.address, at=at, **chosen)


@pytest.fixture(scope="module")
def deployed(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    from microtome.scale.ray import deploy

    folder = tmp_path_factory.mktemp("deployed")
    authority = Authority(folder, "ours")
    signed = authority.sign("127.0.0.1")
    log = folder / "log"
    net, x = make_net(log)
    stages = mt.split(net, x, at=["first", "middle"])
    with deploy(
        stages,
        batch=8,
        batch_window="1s",
        num_cpus=1,
        listen="127.0.0.1:0",
        token=TOKEN,
        tls_cert=signed.cert,
        tls_key=signed.key,
    ) as deployment:
        yield Deployed(net, x, stages, log, deployment, {"token": TOKEN, "ca": authority.file})


@torch.no_grad()
def test_a_client_cuts_where_a_stage_begins(deployed: Deployed) -> None:
    for at in ("(input)", "first", "middle"):
        with deployed.connect(at, codec="zstd") as remote:
            x = torch.randn(1, 8)
            assert remote(x).equal(deployed.net(x)), at
            assert remote.requests[-1].where == "cloud"


@torch.no_grad()
def test_a_batch_of_eight_is_computed_in_one_call(deployed: Deployed) -> None:
    xs = [torch.randn(1, 8) for _ in range(8)]
    with deployed.connect("middle") as remote:
        list(remote.stream(xs, window=8))  # the first batch of so many rows is verified
        deployed.log.write_text("")
        results = list(remote.stream(xs, window=8))
    assert logged_rows(deployed.log) == [8]
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, deployed.net(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_every_stage_computes_a_batch_together(deployed: Deployed) -> None:
    xs = [torch.randn(1, 8) for _ in range(8)]

    def batches_of_eight() -> list[int]:
        handles = [ray.serve.get_deployment_handle(f"stage{index}", deployed.deployment.name) for index in range(3)]
        return [handle.status.remote().result().batches.get(8, 0) for handle in handles]

    with deployed.connect("(input)") as remote:
        list(remote.stream(xs, window=8))  # the first batch of so many rows is verified
        before = batches_of_eight()
        results = list(remote.stream(xs, window=8))
    assert [after - one for after, one in zip(batches_of_eight(), before, strict=True)] == [1, 1, 1]
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, deployed.net(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_calls_of_the_handle_from_eight_threads_are_computed_in_one(deployed: Deployed) -> None:
    boundaries = [deployed.stages[1](deployed.stages[0](torch.randn(1, 8))) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(deployed.deployment.handle, boundaries))  # the first batch of so many rows is verified
        deployed.log.write_text("")
        results = list(pool.map(deployed.deployment.handle, boundaries))
    assert logged_rows(deployed.log) == [8]
    for boundary, result in zip(boundaries, results, strict=True):
        torch.testing.assert_close(result, deployed.stages[2](boundary), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_model_that_mixes_rows_is_not_batched(cluster: Any, tmp_path: Path) -> None:
    from microtome.scale.ray import deploy

    log = tmp_path / "log"
    torch.manual_seed(0)
    net, x = Mixing(log).eval(), torch.randn(1, 8)
    xs = [torch.randn(1, 8) for _ in range(8)]
    with (
        deploy(
            mt.split(net, x, at="first"),
            batch=8,
            batch_window="1s",
            num_cpus=0,
            listen="127.0.0.1:0",
            name="mixing",
        ) as deployment,
        mt.connect(net, x, deployment.address, at="first", fallback=None, codec="raw") as remote,
    ):
        for _ in range(2):
            log.write_text("")
            results = list(remote.stream(xs, window=8))
        assert logged_rows(log) == [1] * 8  # the first time, the verification ran, too
        assert all(result.equal(net(one)) for one, result in zip(xs, results, strict=True))
        handle = ray.serve.get_deployment_handle("stage1", "mixing")
        assert set(handle.status.remote().result().batches) == {1}


@torch.no_grad()
def test_a_deadline_holds_while_a_later_stage_computes(cluster: Any) -> None:
    from microtome.scale.ray import deploy

    model = Slow().eval()
    stages = mt.split(model, asking(), at="head")
    with (
        deploy(stages, num_cpus=0, listen="127.0.0.1:0", name="slow") as deployment,
        Gate() as gate,
        mt.connect(model, asking(), deployment.address, at="(input)", fallback=None, deadline=3.0) as remote,
    ):
        with pytest.raises(RemoteError, match="did not answer in 3 s") as caught:
            remote(asking(gate))
        assert caught.value.kind == "DEADLINE"
        handle = deployment.handle
        request = EncodedOutput(np.frombuffer(handle._pack(asking(gate)).to_bytes(), np.uint8))
        with pytest.raises(Late, match="the deadline of the request has passed, and no replica has answered"):
            handle._chain.compute_one(request, 0, perf_counter() + 1.0)
        gate.open()
        x = asking()
        assert handle(x).equal(model(x))
        remote.options = replace(remote.options, deadline_s=None)
        assert remote(x).equal(model(x))


@torch.no_grad()
def test_the_handle_runs_boundaries_and_inputs_in_the_cluster(deployed: Deployed) -> None:
    handle, x = deployed.deployment.handle, deployed.x

    @ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def call(handle: Any, *arguments: Any) -> Any:
        return [handle(argument) for argument in arguments]

    boundary = deployed.stages[0](x)
    expected = deployed.net(x)
    for output in (handle(x), handle(boundary), *ray.get(call.remote(handle, x, boundary))):
        assert output.equal(expected)
    with pytest.raises(NoMatch, match="the cut of Net at 'last' is not served"):
        handle(mt.Boundary("last", boundary.fingerprint, {}, {}))
    with pytest.raises(RemoteError, match="fewer tensors|lacks|expected"):
        handle(mt.Boundary("first", boundary.fingerprint, {}, {}))


def test_a_replica_has_the_weights_of_its_stage_only(deployed: Deployed) -> None:
    for index, stage in enumerate(deployed.stages):
        handle = ray.serve.get_deployment_handle(f"stage{index}", deployed.deployment.name)
        assert set(handle.status.remote().result().weights) == set(stage.parameters_needed())


def test_sessions_are_refused_with_the_reason(deployed: Deployed) -> None:
    with deployed.connect("first") as remote, pytest.raises(RemoteError, match="replicas on Ray keep none"):
        remote.session()


def test_clients_need_the_token_and_a_cut_that_the_stages_have(deployed: Deployed) -> None:
    with pytest.raises(RemoteError, match="rejects the token"):
        deployed.connect("first", token="another")
    with pytest.raises(RemoteError, match="does not serve the cut at 'last.layer'.*it serves '.input.', 'first', 'mid"):
        deployed.connect("last.layer")
    with pytest.raises(
        BadQuery,
        match="expected at= for .*, got 'auto': it serves stages, and cannot be profiled; choose one of '.input.'",
    ):
        deployed.connect("auto")


def test_a_client_with_other_weights_is_refused(deployed: Deployed) -> None:
    torch.manual_seed(1)
    other = Net(deployed.log).eval()
    with pytest.raises(RemoteError, match="the weights of Net here and of Net at .* differ"):
        mt.connect(other, deployed.x, deployed.deployment.address, at="first", **deployed.security)


def test_what_the_cluster_lacks_is_refused_before_anything_starts(deployed: Deployed) -> None:
    from microtome.scale.ray import deploy

    before = ray.serve.status().applications.keys()
    with pytest.raises(BadQuery, match="expected a node with .*4 GPU for each of the replicas of stage 0, got nodes"):
        deploy(deployed.stages, num_gpus=4, name="other")
    with pytest.raises(
        BadQuery, match="expected nodes with room for 2 ingresses, each on a node of its own since they share"
    ):
        deploy(deployed.stages, num_cpus=0, ingresses=2, name="other")
    with pytest.raises(BadQuery, match="an application named 'microtome' runs already"):
        deploy(deployed.stages)
    assert ray.serve.status().applications.keys() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_start_leaves_no_application(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    from microtome.scale.ray import deploy

    run = ray.serve.run

    def interrupt(*arguments: Any, **options: Any) -> None:
        run(*arguments, **options)
        raise error

    monkeypatch.setattr(ray.serve, "run", interrupt)
    with pytest.raises(error):
        deploy(deployed.stages, only=[1], name="interrupted", listen="127.0.0.1:0", num_cpus=0)
    assert "interrupted" not in ray.serve.status().applications


def test_a_replica_whose_weights_were_changed_does_not_start(deployed: Deployed, tmp_path: Path) -> None:
    from microtome.scale.ray import deploy

    deployed.stages.save(tmp_path)
    weights = tmp_path / "stage2.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    log = deployed.log
    with pytest.raises(
        Unsupported, match="'damaged' did not start: .*stage2.safetensors' was changed since it was saved"
    ):
        deploy(tmp_path, model=lambda: Net(log), only=[1, 2], name="damaged", listen="127.0.0.1:0", num_cpus=0)
    assert "damaged" not in ray.serve.status().applications


def test_the_first_stage_is_run_by_the_client_if_it_is_not_deployed(deployed: Deployed) -> None:
    from microtome.scale.ray.deployment import ClusterHandle
    from microtome.scale.ray.options import DeployOptions
    from microtome.scale.ray.serve_application import StageApplication

    planned = StageApplication(deployed.stages, DeployOptions(only=["first"]))
    handle = ClusterHandle([], planned.model, planned.spec, 1.0)
    with pytest.raises(BadInputs, match="expected a Boundary of the cut at 'first', got other inputs"):
        handle(deployed.x)
