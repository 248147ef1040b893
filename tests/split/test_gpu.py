"""Splitting on a GPU: the same bits on one device, near ones on two."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.devices.pinned_memory import CHUNK
from microtome.engine.fingerprint import weights_fingerprint
from microtome.errors import BadBoundary
from tests.split.test_random_replay import Encoder
from tests.split.test_stages import same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]


def on_gpu(name: str) -> tuple[nn.Module, mt.Inputs]:
    model, inputs = zoo.build(name)
    return model.cuda(), mt.Inputs.of(inputs).to("cuda")


def near(one: Any, other: Any) -> None:
    one, other = ({"": x} if isinstance(x, torch.Tensor) else x for x in (one, other))
    for key in other:
        torch.testing.assert_close(one[key].cpu(), other[key].cpu(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", zoo.names())
def test_every_cut_is_exact_on_a_gpu(name: str) -> None:
    model, given = on_gpu(name)
    with torch.no_grad():
        whole = given.run(model)
        assert same(given.run(model), whole)  # else nothing is shown
        for cut in mt.cuts(model, given):
            stages = mt.split(model, given, at=cut)
            assert stages.verified == "bit-equal", cut.at
            boundary = stages[0](*given.args, **given.kwargs)
            assert {tensor.device.type for tensor in boundary.tensors.values()} == {"cuda"}
            sent = mt.Boundary.from_bytes(boundary.to_bytes())
            assert {tensor.device.type for tensor in sent.tensors.values()} == {"cpu"}
            assert same(stages[1](sent), whole), cut.at  # which brings it to its device


@pytest.mark.parametrize("name", zoo.names())
@pytest.mark.parametrize("there", ["head", "tail"])
def test_the_stages_may_be_on_different_devices(name: str, there: str, tmp_path: Path) -> None:
    model, inputs = zoo.build(name)
    given = mt.Inputs.of(inputs)
    cuts = mt.cuts(model, inputs)
    with torch.no_grad():
        for cut in cuts[::5]:
            folder = tmp_path / cut.at
            mt.split(model, inputs, at=cut).save(folder)
            devices = ("cuda", "cpu") if there == "head" else ("cpu", "cuda")
            stages = [
                mt.load_stage(lambda: zoo.build(name)[0], folder, index, device=device)
                for index, device in enumerate(devices)
            ]
            first = given.to(devices[0])
            near(stages[1](stages[0](*first.args, **first.kwargs)), given.run(model))
            for stage, device in zip(stages, devices, strict=True):
                held = [tensor for tensor in stage.model.parameters() if not tensor.is_meta]
                assert all(tensor.device.type == device for tensor in held)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_on_a_gpu(dtype: torch.dtype) -> None:
    model, given = on_gpu("tiny-resnet")
    with torch.autocast("cuda", dtype=dtype), torch.no_grad():
        whole = given.run(model)
        for cut in mt.cuts(model, given)[::4]:
            stages = mt.split(model, given, at=cut)
            boundary = stages[0](*given.args)
            assert same(stages[1](boundary), whole), cut.at
            assert boundary.nbytes == cut.nbytes


@torch.no_grad()
def test_a_stage_of_a_half_on_a_gpu_has_the_memory_of_a_half() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))

    x = torch.ones(1, 2048)
    model = make().cuda()
    layer = sum(parameter.nbytes for parameter in model[0].parameters())  # type: ignore[index]
    head, _ = mt.split(model, x.cuda(), at="1", load="head")
    expected = model(x.cuda())
    boundary = head(x.cuda())
    _, tail = mt.split(model, x.cuda(), at="1")
    assert same(tail(boundary), expected)
    before = torch.cuda.memory_allocated()
    del model, tail, _
    gc.collect()
    assert before - torch.cuda.memory_allocated() == pytest.approx(6 * layer, rel=0.05)
    assert same(head(x.cuda()).tensors, boundary.tensors)


def test_real_models_are_exact_on_a_gpu() -> None:
    torchvision = zoo.import_torchvision()
    for name in ("resnet50", "swin_t", "mobilenet_v3_large", "densenet121"):
        model = getattr(torchvision.models, name)().eval().cuda()
        x, other = torch.randn(2, 3, 64, 64, device="cuda"), torch.randn(5, 3, 96, 96, device="cuda")
        with torch.no_grad():
            model(x)
            model(other)
            wholes = model(x), model(other)
            cuts = mt.cuts(model, x)
            for cut in cuts[:: len(cuts) // 12]:
                head, tail = mt.split(model, x, at=cut)
                assert same(tail(head(x)), wholes[0]), (name, cut.at)
                assert same(tail(head(other)), wholes[1]), (name, cut.at)


def test_two_streams_and_two_devices_of_inputs() -> None:
    model, given = on_gpu("tiny-vit")
    head, tail = mt.split(model, given, at="blocks.1")
    stream = torch.cuda.Stream()
    with torch.no_grad():
        whole = given.run(model)
        with torch.cuda.stream(stream):
            boundary = head(*given.args)
        stream.synchronize()
        assert same(tail(boundary), whole)
        assert same(tail(boundary.to("cpu")), whole)


def test_cuts_among_layers_dropped_by_draws_on_a_gpu_are_refused() -> None:
    encoder = Encoder(lambda: torch.rand(1, device="cuda").item())
    model, x = nn.Sequential(nn.Linear(4, 4), encoder, nn.Linear(4, 4)).cuda(), torch.ones(2, 4, device="cuda")
    torch.cuda.manual_seed(0)
    before = torch.cuda.get_rng_state()
    cuts = mt.cuts(model, x)
    assert [cut.at for cut in cuts] == ["0", "1.first", "1", "2"]
    assert all("'1' draws, it makes other calls in other runs" in (cut.refused or "") for cut in cuts.refused)
    assert torch.cuda.get_rng_state().equal(before)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 2, CHUNK, CHUNK + 2, 3 * CHUNK + 6])
@pytest.mark.parametrize("codec", ["raw", "fp16", "int8"])
def test_a_boundary_of_any_size_goes_through_pinned_memory(size: int, codec: str) -> None:
    tensor = torch.randn(size // 2, device="cuda").bfloat16()
    on_gpu = mt.Boundary("layer", "8d1f", {"layer": tensor}, {})
    data = on_gpu.to_bytes(codec)
    assert data == on_gpu.to("cpu").to_bytes(codec)
    decoded = mt.Boundary.from_bytes(data).tensors["layer"]
    received = mt.Boundary.from_bytes(data, device="cuda").tensors["layer"]
    assert received.is_cuda
    assert received.cpu().equal(decoded)
    if codec == "raw":
        assert received.equal(tensor)
        assert mt.Boundary.from_bytes(data).to("cuda").tensors["layer"].equal(tensor)


def test_layouts_are_kept_on_a_gpu() -> None:
    base = torch.randn(6, 5, 4, device="cuda")
    tensors = {"permuted": base.permute(2, 0, 1), "expanded": base[0, 0].expand(3, 4), "gaps": base[:, ::2]}
    data = mt.Boundary("layer", "8d1f", tensors, {}).to_bytes()
    received = mt.Boundary.from_bytes(data, device="cuda").tensors
    for name, tensor in tensors.items():
        assert received[name].equal(tensor)
        assert received[name].stride() == tensor.stride()


def test_damage_is_detected_on_the_way_to_a_gpu() -> None:
    data = bytearray(mt.Boundary("layer", "8d1f", {"layer": torch.randn(CHUNK, device="cuda")}, {}).to_bytes())
    data[len(data) // 2] ^= 1
    with pytest.raises(BadBoundary, match="checksum mismatch"):
        mt.Boundary.from_bytes(data, device="cuda")


def test_the_fingerprint_on_a_gpu_is_that_on_the_cpu_and_follows_every_write() -> None:
    layer = nn.Linear(1031, 517).double()
    on_cpu = weights_fingerprint(layer)
    assert weights_fingerprint(layer.cuda()) == on_cpu
    assert weights_fingerprint(layer) == on_cpu  # kept
    layer.weight.data[-1, -1] += 1  # does not change its version
    changed = weights_fingerprint(layer)
    assert changed == weights_fingerprint(layer.cpu()) != on_cpu
    weight = layer.cuda().weight
    weight.data[[0, 1]] = weight.data[[1, 0]]
    assert weights_fingerprint(layer) == weights_fingerprint(layer.cpu()) != changed


@pytest.mark.parametrize("name", ["tiny-vit", "tiny-resnet"])
def test_gradients_across_cuts_are_exact_on_a_gpu(name: str) -> None:
    model, given = on_gpu(name)
    cut = mt.cuts(model, given)[-2]
    head, tail = mt.split(model, given, at=cut, grad=True)
    sent = head(*given.args)
    received = mt.Boundary.from_bytes(sent.to_bytes())
    tail(received).sum().backward()
    sent.backward(mt.Boundary.from_bytes(received.gradients().to_bytes()))
    gradients = {key: weight.grad for key, weight in model.named_parameters()}
    model.zero_grad()
    given.run(model).sum().backward()
    for key, weight in model.named_parameters():
        torch.testing.assert_close(gradients[key], weight.grad)
