"""The two sides on devices of their own."""

from __future__ import annotations

import copy

import pytest
import torch

import microtome as mt
from tests.remote.small import small

ATS = ["", "stem", "layer1.0.conv1", "layer2"]


@pytest.mark.gpu
@pytest.mark.parametrize("at", ATS)
def test_both_sides_on_a_gpu_give_what_it_gives(at: str) -> None:
    model, x = small()
    model, x = model.cuda(), x.cuda()
    with (
        mt.serve(copy.deepcopy(model), x, listen="127.0.0.1:0") as server,
        mt.connect(model, x, server.address, at=at, codec="raw") as remote,
        torch.no_grad(),
    ):
        for rows in (1, 4):
            given = torch.randn(rows, *x.shape[1:], device="cuda")
            result = remote(given)
            assert result.device == given.device
            assert result.equal(model(given))
        assert {sent.where for sent in remote.requests} == {"cloud"}


@pytest.mark.gpu
@pytest.mark.parametrize("at", ATS)
def test_an_edge_without_a_gpu_and_a_server_with_one(at: str) -> None:
    model, x = small()
    with (
        mt.serve(copy.deepcopy(model).cuda(), x.cuda(), listen="127.0.0.1:0") as server,
        mt.connect(model, x, server.address, at=at, codec="raw") as remote,
        torch.no_grad(),
    ):
        assert remote.server.device == "cuda:0"
        result = remote(x)
        assert result.device == x.device
        torch.testing.assert_close(result, model(x), rtol=1e-3, atol=1e-3)
        assert list(remote.stream([x, x]))[1].equal(result)


@pytest.mark.gpu
def test_a_gpu_out_of_memory_answers_that_and_goes_on() -> None:
    model, x = small()
    with (
        mt.serve(copy.deepcopy(model).cuda(), x.cuda(), listen="127.0.0.1:0") as server,
        mt.connect(model, x, server.address, at="", codec="raw", fallback=None) as remote,
        torch.no_grad(),
    ):
        _, whole = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(300e6 / whole)
        try:
            with pytest.raises(mt.MicrotomeError, match="memory") as caught:
                remote(torch.randn(4096, *x.shape[1:]))
            assert getattr(caught.value, "kind", None) == "OUT_OF_MEMORY"
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        torch.testing.assert_close(remote(x), model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_auto_plans_for_a_server_with_a_gpu() -> None:
    model, x = small()
    with (
        mt.serve(copy.deepcopy(model).cuda(), x.cuda(), listen="127.0.0.1:0") as server,
        mt.connect(model, x, server.address) as remote,
    ):
        assert remote.plan is not None
        torch.testing.assert_close(remote(x), model(x), rtol=1e-3, atol=1e-3)
