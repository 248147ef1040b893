"""A file of each kind that microtome reads, with code that reads all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

import microtome as mt
from microtome.capture.store import open_folder
from microtome.cli.samples import read_batches
from microtome.compat.tracr.settings import read_settings
from microtome.devices.meters.csv_file import CsvMeter
from microtome.errors import BadFile, BadWeights, MicrotomeError, SensorFailed, Unsupported
from microtome.plan.codec_benchmark import codec_costs
from microtome.remote.security import read_token
from microtome.results.link import LinkMeasurement
from microtome.results.requests import CutMove, HopRecord, RequestLog, RequestRecord
from microtome.results.sweep import CutTiming, Sweep
from microtome.zoo.weights import load_weights


@dataclass(frozen=True)
class Sample:
    """A file, and how it is read.

    Attributes:
        read: Read it and use what it holds.
        document: What it holds, if that is JSON.
        forge: Write a changed document, checksums that are elsewhere included.
        errors: What may be raised in place of a result.
    """

    file: Path
    read: Callable[[], object]
    document: Any = None
    forge: Callable[[Any], None] | None = None
    errors: tuple[type[Exception], ...] = (BadFile,)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def samples(folder: Path) -> dict[str, Sample]:
    """Write a file of each kind."""
    return {**_results(folder), **_recording(folder / "acts"), **_stages(folder / "stages"), **_others(folder)}


# -- results -----------------------------------------------------------------------------------------------------------

_VIEWS = ("__str__", "__repr__", "to_csv", "to_markdown", "to_json", "_repr_html_", "to_html", "to_perfetto")


def _results(folder: Path) -> dict[str, Sample]:
    model, x = net(), torch.randn(1, 4)
    profile = mt.profile(model, x, measure=("time", "memory"))
    cuts = mt.cuts(model, x)
    costs = codec_costs(cuts, ["raw", "fp16"], model=model, inputs=x)
    link = mt.Link("20Mbps", rtt="15ms")
    hops = (HopRecord("h:1", "0", 0.0, 0.0, 0.1, 0.0),)
    chain = RequestRecord("0", total_s=0.1, began=1.0, later=("1",), hops=hops)
    sent = chain, RequestRecord(None, where="edge", reason="late", began=2.0)
    rows = (
        CutTiming("", "raw", total_s=0.1, planned_s=0.1),
        CutTiming("0", "raw", total_s=0.2),
        CutTiming(None, "raw", failed="no"),
    )
    measured = LinkMeasurement(0.1, 0.01, 1e6, 1e6)
    made = (
        profile,
        profile.diff(mt.profile(nn.Sequential(nn.Linear(4, 8)), x, measure=("time",))),
        cuts,
        mt.plan(cuts, edge=profile, cloud=profile, link=link, codec=("raw", "fp16"), costs=costs),
        costs,
        RequestLog("Net", "h:1", "cpu", 8, 1.0, 2, sent, (CutMove(1.0, "0", "raw", "faster"),), 1.0, "nvml"),
        Sweep("Net", "1x4", "h:1", "cpu", "raw", 3, measured, rows, "none", "", {"cpu": "x"}),
    )
    return {one.kind: _result(folder / f"{one.kind}.json", one.to_json()) for one in made}


def _result(file: Path, text: str) -> Sample:
    file.write_text(text)
    document = json.loads(text)
    return Sample(file, lambda: _view(mt.load(file)), document, lambda changed: _dump(file, changed))


def _view(result: Any) -> None:
    """Make every text there is of a result; a question that it has no answer to is no damage."""
    for view in _VIEWS:
        with suppress(MicrotomeError):
            getattr(result, view, lambda: None)()


def _dump(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document))


# -- folders -----------------------------------------------------------------------------------------------------------


def _recording(folder: Path) -> dict[str, Sample]:
    model = net()
    with mt.record(model, ["0", "2"], to=folder, histogram=(4, -1.0, 1.0)):
        for _ in range(2):
            model(torch.ones(1, 4))
    manifest, index, shard = (folder / name for name in ("manifest.json", "index.jsonl", "shard-00000.safetensors"))
    line = index.read_bytes()
    body = json.loads(line)
    del body["sum"]
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")

    def read() -> None:
        with open_folder(folder) as recording:
            repr(recording), recording._repr_html_()
            for name in recording:
                assert recording.stats(name).count >= 0
                assert all(tensor.isfinite().any() or True for tensor in recording[name])

    def forge_manifest(document: Any) -> None:
        content = document.get("manifest")
        _dump(manifest, document | {"sum": xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())})

    def forge_index(document: Any) -> None:
        text = json.dumps(document).encode()
        index.write_bytes(text[:-1] + b',"sum":"' + xxh3_64_hexdigest(text).encode() + b'"}\n')

    def forge_shard(document: Any) -> None:
        text = json.dumps(document).encode()
        start = len(text).to_bytes(8, "little") + text
        shard.write_bytes(start + data[8 + length :])
        forge_index(body | {"header_sum": xxh3_64_hexdigest(start), "file_bytes": shard.stat().st_size})

    return {
        "manifest": Sample(manifest, read, json.loads(manifest.read_text()), forge_manifest),
        "index": Sample(index, read, body, forge_index),
        "shard": Sample(shard, read, json.loads(data[8 : 8 + length]), forge_shard),
    }


def _stages(folder: Path) -> dict[str, Sample]:
    mt.split(net(), torch.randn(1, 4), at="0").save(folder)
    plan, weights = folder / "plan.json", folder / "stage1.safetensors"
    document = json.loads(plan.read_text())
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")

    def forge_weights(changed: Any) -> None:
        text = json.dumps(changed).encode()
        weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        stages = [document["stages"][0], document["stages"][1] | {"xxh3_128": xxh3_128_hexdigest(weights.read_bytes())}]
        _dump(plan, document | {"stages": stages})

    def read() -> object:
        return mt.load_stage(net, folder, 1)

    errors = (BadFile, BadWeights, Unsupported)
    return {
        "stages": Sample(plan, read, document, lambda changed: _dump(plan, changed), errors),
        "stage weights": Sample(weights, read, json.loads(data[8 : 8 + length]), forge_weights, errors),
    }


# -- single files ------------------------------------------------------------------------------------------------------


def _others(folder: Path) -> dict[str, Sample]:
    import numpy
    from PIL import Image

    state = net().state_dict()
    save_file(state, folder / "weights.safetensors")
    torch.save(state, folder / "weights.pt")
    (folder / "meter.csv").write_text("time_s,watts\n" + "".join(f"{at}.0,4{at}.5\n" for at in range(10, 30)))
    numpy.save(folder / "data.npy", numpy.ones((3, 4), dtype="float32"))
    (folder / "images").mkdir()
    Image.new("RGB", (16, 16), "red").save(folder / "images" / "0.png")
    config = {"default": {"device": "cpu"}, "model": {"model_name": "zoo:tiny-resnet", "input_size": [3, 16, 16]}}
    _dump(folder / "tracr.yaml", config)  # JSON is YAML
    (folder / "token").write_text("a token\n")

    def weights(file: Path) -> Sample:
        return Sample(file, lambda: load_weights(net(), file, "net", meta=False), errors=(BadWeights,))

    def data(file: Path, path: Path, like: torch.Tensor) -> Sample:
        return Sample(file, lambda: [*read_batches(str(path), 2, like)])

    settings = folder / "tracr.yaml"
    meter, token = folder / "meter.csv", folder / "token"
    return {
        "weights.safetensors": weights(folder / "weights.safetensors"),
        "weights.pt": weights(folder / "weights.pt"),
        "meter": Sample(meter, lambda: CsvMeter(meter, "perf", 99.0).between(11.0, 12.0), errors=(SensorFailed,)),
        "array": data(folder / "data.npy", folder / "data.npy", torch.ones(1, 4)),
        "image": data(folder / "images" / "0.png", folder / "images", torch.ones(1, 3, 8, 8)),
        "settings": Sample(
            settings, lambda: read_settings(settings, ()), config, lambda one: _dump(settings, one), (MicrotomeError,)
        ),
        "token": Sample(token, lambda: read_token(str(token))),
    }
