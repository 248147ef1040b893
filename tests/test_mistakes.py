"""Likely mistakes in Python: each error names the mistake and what to do; `tests/cli/test_mistakes.py` has others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome
from microtome import zoo

mt: Any = microtome  # mistakes that a type checker would find, too

RESNET, X = zoo.build("tiny-resnet")
VIT, IMAGE = zoo.build("tiny-vit")
LINK: dict[str, Any] = {"rtt": "1ms"}


def profile() -> microtome.Profile:
    return microtome.profile(RESNET, X)


def stages() -> Any:
    return mt.split(RESNET, X, at="layer1")


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    # -- the model
    "a class": (lambda: mt.profile(nn.Linear, "1x2"), "got the class Linear; create it first, with its arguments"),
    "inputs first": (lambda: mt.cuts(X, RESNET), "got Tensor 2x3x32x32; the model comes first, then its inputs"),
    "a name": (lambda: mt.profile("resnet50", "1x3"), "microtome.zoo.resolve builds a model from a name such as"),
    "a name of the zoo": (lambda: zoo.build("resnet"), "no model 'resnet'. Did you mean 'tiny-resnet'"),
    "a typo in a source": (lambda: zoo.resolve("torchvision:resnet5"), "Did you mean torchvision:resnet50"),
    # -- inputs
    "commas": (lambda: mt.profile(RESNET, "1,3,32,32"), "did you mean '1x3x32x32'?"),
    "a typo in a dtype": (lambda: mt.profile(RESNET, "1x3:flaot32"), "expected a dtype of torch, .* got 'flaot32'"),
    "a negative size": (lambda: mt.profile(RESNET, (-1, 3)), "expected sizes of 0 or more"),
    "numbers as names": (lambda: mt.profile(RESNET, {0: X}), "expected the names of arguments as keys"),
    "no inputs": (lambda: mt.profile(RESNET, None), "No inputs were passed to the ResNet: pass a tensor"),
    "no inputs to cut": (lambda: mt.cuts(RESNET, None), "No inputs were passed .* mt.Inputs.None. passes None"),
    "no inputs to serve": (lambda: mt.serve(RESNET), "No inputs were passed to the ResNet: pass a tensor"),
    "no inputs to connect": (lambda: mt.connect(RESNET, None, "127.0.0.1:1"), "No inputs were passed to the ResNet"),
    # -- options
    "a typo in measure": (lambda: mt.profile(RESNET, X, measure="tiem"), "to be of 'time', .*, got 'tiem'"),
    "few repeats": (lambda: mt.profile(RESNET, X, measure="time", repeat=1), "expected repeat to be at least 3"),
    "a convention": (lambda: mt.profile(RESNET, X, convention="thop"), "expected a convention of .* got 'thop'"),
    "a meter": (lambda: mt.profile(RESNET, X, measure="energy", meter="nvlm"), "expected a meter of nvml, .* 'nvlm'"),
    # -- addresses
    "a typo in a path": (lambda: profile()["layer1.0.conv"], "Did you mean .*'layer1.0.conv1'"),
    "a repeated module": (lambda: profile()["layer1.0.relu"], "ran 2 times: say which of 'layer1.0.relu#0', "),
    "a type that is not there": (lambda: mt.extract(RESNET, X, nn.LSTM), "has no module of type LSTM. There are: "),
    "modules before inputs": (lambda: mt.extract(RESNET, "layer1", X), "expected modules, .* got inputs of the model"),
    "inputs as modules": (lambda: mt.record(RESNET, X), "expected modules, .* got inputs of the model: Tensor 2x"),
    "a cut that is not there": (lambda: mt.split(RESNET, X, at="layer9"), "Did you mean .*'layer1'"),
    # -- results
    "a metric": (lambda: profile().top(by="tme"), "no metric 'tme' to order by: did you mean 'time_s'"),
    "a metric as a number": (
        lambda: profile().top("macs"),  # type: ignore[arg-type]
        "expected n of 1 or more, got 'macs': pass a metric as by='macs'",
    ),
    "times that were not measured": (lambda: profile().top(by="time_s"), 'to order by: add measure=["time"]'),
    "a plan without times": (
        lambda: mt.plan(mt.cuts(RESNET, X), edge=profile(), cloud=profile(), link=mt.Link("20Mbps", **LINK)),
        "the profile of 'edge' has no times: profile the model there with measure=[\"time\"]",
    ),
    "a plan of another model": (
        lambda: mt.plan(mt.cuts(VIT, IMAGE), edge=profile(), cloud=profile(), link=mt.Link("20Mbps", **LINK)),
        "the cuts are of a ViT, and the profile of 'edge' is of a ResNet",
    ),
    "a link without a unit": (lambda: mt.Link("20", **LINK), "expected a bandwidth, such as 20Mbps .* got '20'"),
    "attention of a CNN": (lambda: mt.attention(RESNET, X), "computed no attention|no attention"),
    # -- edits and stages
    "an edit that is not called": (lambda: mt.edit(RESNET, {"layer1": mt.zero}), "call it, as in mt.zero"),
    "a tail on inputs": (lambda: stages()[1](X), "takes the output of the stage before it: expected one Boundary"),
    "a tail on bytes": (
        lambda: stages()[1](stages()[0](X).to_bytes()),
        "expected one Boundary, got bytes: decode it with mt.Boundary.from_bytes",
    ),
    "a tail on nothing": (lambda: stages()[1](), "expected one Boundary, got nothing"),
    "a head on a boundary": (
        lambda: stages()[0](stages()[0](X)),
        "the head takes the inputs of the model, got a Bound",
    ),
    "a head with more inputs": (lambda: stages()[0](X, X), "expected|differ"),
    "a head with a list": (
        lambda: stages()[0]([X]),
        "head: expected .tensor., as on the example, got ..tensor..",
    ),
    "bytes that are no boundary": (lambda: mt.Boundary.from_bytes(b"hello"), "not a boundary: expected at least"),
    # -- files and servers
    "a missing file": (lambda: mt.load("nothing.json"), "cannot read 'nothing.json': No such file"),
    "a missing folder": (lambda: profile().to_html("/does/not/exist.html"), "cannot write '/does/not/exist.html'"),
    "a port to listen on": (
        lambda: mt.serve(RESNET, X, listen="127.0.0.1:99999"),
        "expected an address to listen on such as 127.0.0.1:7070, got '127.0.0.1:99999': a port is less than 65536",
    ),
    "a port alone": (lambda: mt.serve(RESNET, X, listen=7070), "got 7070: did you mean 127.0.0.1:7070?"),
    "a URL": (lambda: mt.connect(RESNET, X, "http://127.0.0.1:1"), "leave out 'http://', as in 127.0.0.1:1"),
    "a deadline": (lambda: mt.connect(RESNET, X, "127.0.0.1:1", deadline="soon"), "or '500ms', got 'soon'"),
    "a list as a deadline": (
        lambda: mt.connect(RESNET, X, "127.0.0.1:1", deadline=[1]),
        "expected a deadline of more than 0 seconds, such as 0.5 or '500ms', got a list",
    ),
    "limits as text": (
        lambda: profile().diff(profile()).over("macs=5%"),  # type: ignore[arg-type]
        'expected limits as a dict, such as {"macs": "5%"}, got ',
    ),
    "a server without a port": (lambda: mt.connect(RESNET, X, "localhost", at="layer1"), "host:7070, got 'localhost'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_what_to_do(name: str) -> None:
    make, message = MISTAKES[name]
    with pytest.raises(microtome.MicrotomeError) as caught:
        make()
    assert re.search(message.replace("[", r"\[").replace("?", r"\?"), str(caught.value))


@pytest.mark.parametrize(
    ("inputs", "note"),
    [
        (microtome.Inputs(None), "No inputs were passed to the Sequential: pass a tensor"),
        ({}, "No inputs were passed to the Sequential: pass a tensor"),
        (7, "The input 'input' is of type int: if the model expects a tensor, pass torch.tensor(...)"),
        ({"input": [[1.0, 2.0]]}, "The input 'input' is of type list: if the model expects a tensor"),
        ([torch.ones(1, 2)] * 2, "The list of tensors is one argument: a tuple passes each as an argument of its own"),
    ],
)
def test_inputs_that_are_no_tensors_are_named(inputs: Any, note: str) -> None:
    with pytest.raises(TypeError) as caught:
        mt.profile(nn.Sequential(nn.Linear(2, 2)), inputs)
    assert any(note in line for line in caught.value.__notes__)


def test_an_error_of_the_model_names_the_layer_and_the_inputs() -> None:
    with pytest.raises(RuntimeError) as caught, torch.no_grad():
        mt.profile(RESNET, (1, 4, 32, 32))
    notes = " ".join(caught.value.__notes__)
    assert "in the call 'stem.0' (Conv2d)" in notes
    assert "the model ran on Inputs(1x4x32x32:float32)" in notes


NET = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))


def _run_inside(session: Any) -> None:
    with session:
        NET(torch.ones(1, 5))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: mt.profile(NET, x),
        lambda x: mt.profile(NET, x, measure="time"),
        lambda x: mt.trace(NET, x),
        lambda x: mt.extract(NET, x, "1"),
        lambda x: mt.attention(NET, x),
        lambda x: mt.cuts(NET, x),
        lambda x: mt.split(NET, x, at="0"),
        lambda x: mt.split(NET, torch.ones(1, 4), at="0")[0](x),
        lambda x: _run_inside(mt.record(NET, "1")),
        lambda x: _run_inside(mt.track(NET)),
        lambda x: _run_inside(mt.edit(NET, {"1": mt.zero()})),
    ],
)
def test_every_function_names_the_call_in_which_the_model_raised(run: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError) as caught, torch.no_grad():
        run(torch.ones(1, 5))
    # A head observes only the calls that lead to its cut.
    assert any(
        note in ("in the call '0.0' (Linear)", "in the call '0' (Sequential)") for note in caught.value.__notes__
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "got"),
    [
        (([[1, 2]],), {}, "list [[1, 2]]"),
        (("abc",), {}, "str 'abc'"),
        ((), {"input_ids": [1, 2]}, "list [1, 2]"),
        ((), {"inputs": 3}, "int 3"),
    ],
)
def test_tokens_to_continue_are_a_tensor(args: tuple[Any, ...], kwargs: dict[str, Any], got: str) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 30}
    resolved = zoo.resolve("hf:gpt2", args=config, inputs="input_ids=1x4:int64")
    split = mt.split(resolved.model, resolved.inputs, at="transformer.h.0")
    with pytest.raises(microtome.errors.BadInputs, match="expected a tensor of token ids, got ") as caught:
        split.generate(*args, **kwargs, max_new_tokens=1)
    assert f"got {got}: tokenize a text, and pass numbers as torch.tensor([[1, 2]])" in str(caught.value)
