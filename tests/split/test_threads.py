"""Several threads that look at one model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import microtome as mt
from microtome import zoo
from microtome.split.splitter import Splitter


def test_threads_that_look_at_one_model_at_once_leave_it_as_it_was() -> None:
    model, x = zoo.build("tiny-resnet")
    assert isinstance(x, Tensor)
    model.eval()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        wanted = model(x)

    def look(number: int) -> tuple[str, bool]:
        with torch.no_grad():
            mt.profile(model, x)
            splitter = Splitter(model, x)
            stages = splitter.at(splitter.cuts[number % len(splitter.cuts)])
            return splitter.fingerprint, stages.verified == "bit-equal"

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(look, range(24)))
    assert len(found) == 1
    assert found.pop()[1]
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    assert all(id(tensor) == before[name][0] and tensor.equal(before[name][1]) for name, tensor in after.items())
    with torch.no_grad():
        assert model(x).equal(wanted)
