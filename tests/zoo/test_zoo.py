"""The zoo: the same everywhere, and with the traits that its models are there for."""

from __future__ import annotations

import pytest
import torch

from microtome import Inputs, zoo
from microtome.errors import NoMatch


@pytest.mark.parametrize("name", zoo.names())
def test_weights_and_inputs_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(0)
    first, inputs = zoo.build(name)
    torch.manual_seed(99)
    again, same_inputs = zoo.build(name)
    other, _ = zoo.build(name, seed=1)
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
    is_other = any(not torch.equal(value, other.state_dict()[key]) for key, value in first.state_dict().items())
    assert is_other == (name != "tiny-writer")  # which is trained
    torch.testing.assert_close(inputs, same_inputs, rtol=0, atol=0)


@pytest.mark.parametrize("name", zoo.names())
def test_building_leaves_the_random_state_as_it_was(name: str) -> None:
    before = torch.get_rng_state()
    zoo.build(name)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", zoo.names())
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model, inputs = zoo.build(name)
    assert not model.training
    output = Inputs.of(inputs).run(model)
    (output["logits"] if isinstance(output, dict) else output).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_is_built_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        model, inputs = zoo.build("tiny-vit")
    assert isinstance(inputs, torch.Tensor)
    assert {inputs.device.type, *(p.device.type for p in model.parameters())} == {"cpu"}


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        NoMatch, match=r"the zoo has no model 'tiny-resnets'. Did you mean 'tiny-resnet'\? It has: tiny-decoder"
    ):
        zoo.build("tiny-resnets")


@pytest.mark.parametrize("name", ["torchvision:resnet18", "zoo:tiny-resnet"])
def test_build_names_resolve_for_other_sources(name: str) -> None:
    with pytest.raises(NoMatch, match=rf"expected the name of a built-in model, .* zoo\.resolve\('{name}'\) builds"):
        zoo.build(name)


@pytest.mark.parametrize("text", ["tiny-vit", "zo:tiny-vit", "tiny-vits"])
def test_a_name_without_its_source(text: str) -> None:
    with pytest.raises(NoMatch, match="is not the name of a model: expected SOURCE:NAME, such as 'zoo:tiny-vit'"):
        zoo.resolve(text)
