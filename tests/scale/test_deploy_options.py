"""What `deploy` refuses before anything starts, and the example files."""

from __future__ import annotations

import copy
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadFile, BadQuery, BadWeights, MicrotomeError, NoMatch, RemoteError, Unsupported
from microtome.remote.inference_backend import EncodedOutput
from microtome.remote.stage_ref import StageRef
from microtome.split.boundary.decoder import decode_header
from microtome.split.stages import Stages
from tests.scale.serve_cluster import ROOT, make_net

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'microtome[ray]'")

EXAMPLES = ROOT / "examples" / "ray"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the cluster of other tests: what is not refused before ends with another error."""

    def start() -> None:
        raise ConnectionError("no cluster here")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    net, x = make_net(tmp_path_factory.mktemp("net") / "log")
    return mt.split(net, x, at=["first", "middle"])


@pytest.fixture(scope="module")
def parts(stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    stages.save(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["last"]}, "expected one of the stages 0 from '.input.' to 'first'; 1 from .*; got 'last'"),
        ({"only": [3]}, "expected one of the stages .*; got 3"),
        ({"only": [True]}, "expected one of the stages .*; got True"),
        ({"only": 1}, "expected only= with numbers of stages, or the cuts where they begin, got 1"),
        ({"replica": 2}, "deploy has no option 'replica': did you mean 'replicas'.$"),
        ({"foo": 1}, "deploy has no option 'foo': expected one of model, inputs, only, replicas, .*, retry$"),
        ({"only": "first"}, "expected only= with numbers of stages, or the cuts where they begin, got 'first'"),
        ({"only": [0, 2]}, "expected stages in a row, got 0, 2"),
        ({"replicas": 0}, "expected a number of 1 or more as replicas, or a list with one for each stage, got 0"),
        ({"replicas": [1, 2]}, "expected replicas for each of 3 stages, got 2"),
        ({"autoscaling": (4, 1)}, "expected a pair such as .1, 4., or None as autoscaling, .* got .4, 1."),
        ({"num_gpus": -1}, "expected a number of 0 or more as num_gpus"),
        ({"resources": {"edge": "much"}}, "expected a dict such as {'edge': 1}, or None as resources"),
        ({"ingress_resources": "edge"}, "expected ingress_resources as a dict such as .*, got 'edge'"),
        ({"ingresses": 0}, "expected ingresses of 1 or more, got 0"),
        ({"batch": 0}, "expected batch of 1 or more, got 0"),
        ({"batch_window": "soon"}, "expected a time, such as 15ms or 0.2s, got 'soon'"),
        ({"listen": "here"}, "an address to listen on such as 0.0.0.0:7070"),
        ({"max_message": "4GB"}, "expected max_message of at most"),
        ({"tls_cert": "server.pem"}, "TLS needs both"),
        ({"token": ""}, "expected a token of one line of ASCII, got an empty one"),
        ({"model": nn.Linear}, "expected model= and inputs= only for a folder, got stages, which have both"),
    ],
)
def test_an_invalid_option_is_refused(stages: Stages, options: dict[str, Any], message: str) -> None:
    from microtome.scale.ray import application, deploy

    for function in (application, deploy):
        with pytest.raises(BadQuery, match=message):
            function(stages, **options)


def test_stages_are_named_as_cuts_are(stages: Stages) -> None:
    from microtome.scale.ray.stage_sources import StageSet

    cut = mt.cuts(stages[0].model, torch.randn(1, 8))["middle"]
    names: list[tuple[Any, list[int]]] = [
        (["(input)"], [0]),
        ([""], [0]),
        (["first#0"], [1]),
        ([cut], [2]),
        ([0, "first", cut], [0, 1, 2]),
        (range(1, 3), [1, 2]),
    ]
    for only, expected in names:
        assert list(StageSet(stages).resolve(only)) == expected


@pytest.mark.parametrize("name", [5, "", None])
def test_a_name_of_an_application_that_is_no_name_is_refused(stages: Stages, name: Any) -> None:
    from microtome.scale.ray import deploy

    with pytest.raises(BadQuery, match="expected a name of the application, such as 'microtome', got"):
        deploy(stages, name=name)


def test_an_application_that_was_stopped_says_so(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from microtome.scale.ray.deployment import ClusterHandle, Deployment
    from microtome.scale.ray.options import DeployOptions
    from microtome.scale.ray.serve_application import StageApplication

    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={}))
    planned = StageApplication(stages, DeployOptions())
    deployment = Deployment("net", SimpleNamespace(), ClusterHandle([], planned.model, planned.spec, 60.0))
    deployment.stop()
    for call in (lambda: deployment.address, lambda: deployment.handle(torch.randn(1, 8))):
        with pytest.raises(RemoteError, match="the application 'net' was stopped: deploy it again"):
            call()


def test_a_folder_needs_what_makes_the_model(parts: Path, stages: Stages, tmp_path: Path) -> None:
    from microtome.scale.ray import deploy

    def build() -> nn.Module:
        return make_net(tmp_path / "log")[0]

    with pytest.raises(BadQuery, match="expected model=, a class or function that builds the model of .*, got None"):
        deploy(parts)
    with pytest.raises(BadQuery, match="expected inputs= beside the folder, from which batching is verified"):
        deploy(parts, model=build, batch=8)
    with pytest.raises(BadFile, match="holds no split model"):
        deploy(tmp_path, model=build)
    with pytest.raises(BadWeights, match="expected a Net, as in .*, got a Linear"):
        deploy(parts, model=lambda: nn.Linear(1, 1))
    with pytest.raises(BadQuery, match="expected the stages of mt.split, or the folder of Stages.save, got <Stage 0"):
        deploy(stages[0])  # type: ignore[arg-type]


class OneRow(nn.Module):
    """Accepts one row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.view(1, 8)))


def test_a_model_that_rejects_a_batch_is_refused_with_the_reason() -> None:
    from microtome.scale.ray import deploy

    stages = mt.split(OneRow().eval(), torch.randn(1, 8), at="first")
    with pytest.raises(
        BadQuery, match="batch=8 needs a batch of two examples, .* cannot compute here: .*shape '.1, 8.'"
    ):
        deploy(stages, batch=8)
    with pytest.raises(ConnectionError, match="no cluster here"):
        deploy(stages)


class Counter(nn.Module):
    """Carries a number from run to run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Tensor
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.runs


def test_stages_that_cannot_run_in_replicas_are_refused(tmp_path: Path) -> None:
    from microtome.scale.ray import deploy

    with pytest.raises(Unsupported, match="replicas cannot run this model: it carries .* from run to run"):
        deploy(mt.split(nn.Sequential(nn.Linear(4, 4), Counter()).eval(), torch.randn(1, 4), at="0"))
    net, x = make_net(tmp_path / "log")
    with pytest.raises(
        Unsupported, match="the weights of stage 0 from '.input.' to 'first' are not in this process, such as 'first"
    ):
        deploy(mt.split(net, x, at="first", load="tail"))


def test_a_server_that_others_reach_is_warned_of(stages: Stages) -> None:
    from microtome.scale.ray import deploy

    with (
        pytest.warns(RuntimeWarning, match="0.0.0.0:0 can be reached from other machines, and"),
        pytest.raises(ConnectionError, match="no cluster here"),
    ):
        deploy(stages, listen="0.0.0.0:0")


def test_a_replica_refuses_a_stage_of_other_weights(parts: Path, tmp_path: Path) -> None:
    from microtome.scale.ray.replica import ReplicaOptions, StageReplica
    from microtome.scale.ray.stage_sources import FolderStage

    source = FolderStage(lambda: make_net(tmp_path / "log")[0], str(parts), 2)
    options = ReplicaOptions(StageRef(("first", "middle"), 2), "another", "cpu", 1 << 20)
    with pytest.raises(
        BadWeights, match="expected the stage from 'middle' to '.output.' of the model with the fingerpr"
    ):
        StageReplica(source, options)


def test_a_packed_stage_has_its_weights_only_and_computes_the_same(tmp_path: Path) -> None:
    from ray import cloudpickle

    from microtome.scale.ray.stage_sources import StageSet

    model, x = zoo.build("tiny-resnet")
    stages = mt.split(model.eval(), x, at="layer1")
    (source,) = StageSet(stages).sources(range(1, 2))
    tail = cloudpickle.loads(cloudpickle.dumps(source)).load("cpu")
    needed = set(stages[1].parameters_needed())
    assert {name for name, tensor in tail.model.state_dict().items() if not tensor.is_meta} == needed
    with torch.no_grad():
        assert tail(stages[0](x)).equal(model(x))
    assert not any(tensor.is_meta for tensor in model.parameters())


def test_errors_of_a_replica_keep_their_kind() -> None:
    with pytest.raises(RemoteError, match="too much") as caught:
        EncodedOutput(kind="TOO_LARGE", message="too much").check()
    assert caught.value.kind == "TOO_LARGE"
    EncodedOutput(b"").check()


def test_the_ingress_decodes_the_header_alone(stages: Stages) -> None:
    from microtome.scale.ray.ingress import ReplicaBackend
    from microtome.scale.ray.options import DeployOptions
    from microtome.scale.ray.serve_application import StageApplication
    from microtome.scale.ray.stage_chain import StageChain

    backend = ReplicaBackend(StageApplication(stages, DeployOptions(only=[1])).model, StageChain([], 1.0))
    boundary = stages[0](torch.randn(1, 8))
    data = boundary.to_bytes()
    decoded = backend.decode(data, 1 << 20)
    assert (decoded.at, bytes(decoded.data)) == ("first", data)
    assert decode_header(data, 1 << 20)["fingerprint"] == stages.fingerprint
    with pytest.raises(
        NoMatch, match="expected the stage from 'first' to 'middle', got that from 'first' to '.output.'"
    ):
        backend.check_stage(StageRef.tail("first"), decoded)
    with pytest.raises(MicrotomeError, match="expected a boundary of the cut at 'middle', got one of 'first'"):
        backend.check_stage(StageRef.tail("middle"), decoded)
    with pytest.raises(MicrotomeError, match="expected a boundary of Net with the fingerprint"):
        backend.decode(mt.Boundary("first", "other", {}, {}).to_bytes(), 1 << 20)
    with pytest.raises(MicrotomeError, match="checksum mismatch in the header"):
        backend.decode(data[:40] + b"?" + data[41:], 1 << 20)
    with pytest.raises(Unsupported, match="replicas keep no sessions"):
        backend.tail_for(b"", 0)


# -- the example files -------------------------------------------------------------------------------------------------


def _object(required: str, optional: str = "", **properties: Any) -> dict[str, Any]:
    """A JSON schema of an object with these fields and no others."""
    fields = {name: properties.get(name, {}) for name in f"{required} {optional}".split()}
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


_TEXT, _COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
_START = {"type": "object", "additionalProperties": {"type": "string"}}  # numbers and flags are strings, too
#: A RayService, as the API reference of KubeRay (ray.io/v1) describes it. Pods have the schema of Kubernetes.
RAY_SERVICE = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_object("name", "namespace labels annotations", name=_TEXT),
    spec=_object(
        "serveConfigV2 rayClusterConfig",
        serveConfigV2=_TEXT,
        rayClusterConfig=_object(
            "headGroupSpec",
            "rayVersion workerGroupSpecs enableInTreeAutoscaling",
            rayVersion=_TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=_object("rayStartParams template", "serviceType", rayStartParams=_START, serviceType=_TEXT),
            workerGroupSpecs={
                "type": "array",
                "items": _object(
                    "groupName minReplicas maxReplicas rayStartParams template",
                    "replicas numOfHosts",
                    groupName=_TEXT,
                    rayStartParams=_START,
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas", "numOfHosts"), _COUNT),
                ),
            },
        ),
    ),
)


def test_the_manifest_has_the_fields_and_types_that_kuberay_documents() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML, which Ray depends on, is not installed")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, which Ray depends on, is not installed")
    service, port = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    validator = jsonschema.Draft202012Validator(RAY_SERVICE)
    validator.validate(service)
    cluster = service["spec"]["rayClusterConfig"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for pod in (group["template"]["spec"] for group in (head, workers)):
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    labels, selector = head["template"]["metadata"]["labels"], port["spec"]["selector"]
    assert selector.items() <= labels.items()
    mistakes: list[tuple[Any, str, Any]] = [
        (head["rayStartParams"], "num-cpus", 0),
        (workers, "replicas", "2"),
        (workers, "replica", 2),
        (cluster, "rayVersion", 2.6),
    ]
    for place, name, wrong in mistakes:
        before = dict(place)
        place[name] = wrong
        assert not validator.is_valid(service), name
        place.clear()
        place.update(before)
    del workers["template"]
    assert not validator.is_valid(service)


def test_kubernetes_accepts_the_pods_and_the_service_of_the_manifest() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="install kubernetes-validate, as make test-ray does")
    yaml = pytest.importorskip("yaml", reason="PyYAML, which Ray depends on, is not installed")
    service, port = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    cluster = service["spec"]["rayClusterConfig"]
    resources = [port]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        resources.append({"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]})
    for resource in resources:
        kubernetes.validate(resource, "1.30", strict=True)
    unknown = copy.deepcopy(resources[-1])
    unknown["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes.ValidationError, match="'volumeMount' was unexpected"):
        kubernetes.validate(unknown, "1.30", strict=True)


def test_ray_accepts_the_application_and_the_options_of_the_manifest() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML, which Ray depends on, is not installed")
    from ray.scripts.scripts import start
    from ray.serve.schema import ServeDeploySchema

    spec = next(yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text()))["spec"]
    schema = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    assert [one.import_path for one in schema.applications] == ["serve_app:app"]
    options = {option for parameter in start.params for option in parameter.opts}
    head, (workers,) = spec["rayClusterConfig"]["headGroupSpec"], spec["rayClusterConfig"]["workerGroupSpecs"]
    assert {f"--{name}" for name in (*head["rayStartParams"], *workers["rayStartParams"])} <= options


def test_the_application_of_the_manifest_is_made_from_a_folder(tmp_path: Path) -> None:
    from ray.serve.deployment import Application

    model, x = zoo.build("tiny-resnet")
    mt.split(model, x, at="layer1").save(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTS", str(tmp_path))
        assert isinstance(runpy.run_path(str(EXAMPLES / "serve_app.py"))["app"], Application)


@pytest.mark.integration
@pytest.mark.slow
def test_the_example_runs_on_one_machine() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "serve_tail.py")],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "one request is bit-equal: True" in done.stdout
    assert "32 requests in batches agree: True" in done.stdout
    assert "by the handle, bit-equal: True" in done.stdout
