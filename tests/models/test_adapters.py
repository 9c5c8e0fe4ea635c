"""Partial training of an encoder: what is frozen stays as it is, and adapters start as nothing and can be merged."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcir.config import ModelConfig
from fedcir.errors import InputError
from fedcir.models.adapters import LowRank, PartialEncoder, frozen_names, limit_training, merge_adapters
from fedcir.models.builder import make_image_builder
from fedcir.models.networks import CNN, ResNet18, StandardisedConv

LORA: dict[str, Any] = {"adapter": "lora"}


def images(count: int = 4, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def limit(network: nn.Module, **settings: Any) -> PartialEncoder:
    return limit_training(copy.deepcopy(network), ModelConfig(**settings), 0)


def take_step(encoder: nn.Module) -> None:
    encoder.train()
    encoder(images()).square().sum().backward()
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.01 * parameter.grad / (parameter.grad.norm() + 1e-6))


@pytest.mark.parametrize(
    "network", [CNN(), CNN(norm="standardised"), ResNet18(width=8), ResNet18(width=8, norm="group")]
)
def test_adapters_change_nothing_before_they_train_and_are_merged_to_the_bit(network: nn.Module) -> None:
    adapted = limit(network, **LORA).eval()
    with torch.no_grad():
        assert torch.equal(adapted(images()), network.eval()(images()))
    take_step(adapted)
    take_step(adapted)  # the first step changes only `up`
    merged = merge_adapters(adapted.eval())
    with torch.no_grad():
        assert torch.equal(merged(images()), adapted(images()))
        assert not torch.equal(merged(images()), network.eval()(images()))
    assert merged.network.state_dict().keys() == network.state_dict().keys()
    assert any(isinstance(part, LowRank) for part in adapted.modules())  # a copy was merged


def test_a_network_without_adapters_is_merged_to_itself() -> None:
    network = limit(CNN(), train=("fc",))
    assert merge_adapters(network) is network


@pytest.mark.parametrize("settings", [{"stride": 2, "padding": 1}, {"dilation": 2}, {"padding": "same", "bias": False}])
def test_the_adapter_of_a_convolution_is_one_to_few_channels_and_a_1x1_convolution(settings: dict[str, Any]) -> None:
    layer = nn.Conv2d(3, 6, 3, **settings)
    adapted = limit(nn.Sequential(layer), **LORA, adapter_rank=2, adapter_alpha=3.0)
    (adapter,) = (part for part in adapted.modules() if isinstance(part, LowRank))
    nn.init.normal_(adapter.up)
    narrow = F.conv2d(images(), adapter.down.view(2, 3, 3, 3), None, layer.stride, layer.padding, layer.dilation)
    change = 3 / 2 * F.conv2d(narrow, adapter.up[:, :, None, None])
    torch.testing.assert_close(adapted(images()), layer(images()) + change, rtol=1e-4, atol=1e-4)
    assert adapter.down.numel() + adapter.up.numel() == 2 * (3 * 9 + 6)


def test_an_adapter_of_standardised_weights_changes_them_before_they_are_standardised() -> None:
    layer = StandardisedConv(3, 6, 3, 1, 1)
    adapted = limit(nn.Sequential(layer), **LORA)
    (adapter,) = (part for part in adapted.modules() if isinstance(part, LowRank))
    nn.init.normal_(adapter.up)
    changed = copy.deepcopy(layer)
    changed.weight.data += 2 * (adapter.up @ adapter.down).view(6, 3, 3, 3)  # alpha / rank = 16 / 8
    torch.testing.assert_close(adapted(images()), changed(images()))


@pytest.mark.parametrize("parts", [("layer4",), ("*.bias",), ("layer4.1.bn2.weight",)])
def test_what_is_frozen_never_changes_not_even_its_statistics(parts: tuple[str, ...]) -> None:
    partial = limit(ResNet18(width=8), train=parts)
    before = copy.deepcopy(partial.network.state_dict())
    take_step(partial)
    after = partial.network.state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == partial.trained
    assert {name.removeprefix("network.") for name in frozen_names(partial)} == after.keys() - changed


def test_parts_that_are_frozen_are_in_evaluation_mode_and_have_no_gradients() -> None:
    partial = limit(ResNet18(width=8), train=("layer4",))
    assert partial.trained == {name for name in partial.network.state_dict() if name.startswith("layer4.")}
    take_step(partial)
    assert not partial.network.layer1.training
    assert partial.network.layer4.training
    assert all(p.grad is None and not p.requires_grad for p in partial.network.layer1.parameters())


def test_dropout_is_off_in_frozen_parts_only() -> None:
    network = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout()), nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout())
    )
    partial = limit(network, train=("1",)).train()
    assert [part.training for part in partial.modules() if isinstance(part, nn.Dropout)] == [False, True]


@pytest.mark.parametrize(
    ("parts", "trained"),
    [
        (("layer4.1",), {"layer4.1"}),
        (("layer[34]", "head"), {"layer3", "layer4"}),
        (("*.bn2", "bn1"), {"layer1.0.bn2", "layer4.1.bn2", "bn1"}),
        (("head",), set()),
    ],
)
def test_parts_are_named_in_full_or_by_a_pattern(parts: tuple[str, ...], trained: set[str]) -> None:
    partial = limit(ResNet18(width=8), train=parts)
    for name in trained:
        assert any(tensor.startswith(name) for tensor in partial.trained), name
    wrong = [t for t in partial.trained if not any(t.startswith(n) for n in trained) and ".bn2" not in t]
    assert not wrong


def test_adapters_are_for_layers_that_are_frozen_and_not_grouped() -> None:
    network = nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.LazyLinear(5))
    network(torch.zeros(1, 4, 8, 8))
    partial = limit(network, **LORA, train=("3",))
    adapters = {name.partition(".parametrizations")[0] for name in partial.trained if "parametrizations" in name}
    assert adapters == {"1"}
    assert {"3.weight", "3.bias"} <= partial.trained


def test_adapter_targets_name_layers_or_parts() -> None:
    partial = limit(ResNet18(width=8), **LORA, adapter_targets=("layer4", "*.downsample.0"))
    adapted = {name.partition(".parametrizations")[0] for name in partial.trained}
    fourth = {f"layer4.{block}.conv{number}" for block in (0, 1) for number in (1, 2)}
    assert adapted == {*fourth, *(f"layer{number}.0.downsample.0" for number in (2, 3, 4))}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": ("layer9",)}, "no part 'layer9'; choose from conv1, bn1, layer1.0 to layer1.1, .*, head"),
        ({**LORA, "adapter_targets": ("bn1",)}, "'bn1' is no linear layer.* choose from conv1, layer1"),
        ({**LORA, "train": ("*",)}, "no linear layer or plain convolution that is frozen"),
    ],
)
def test_a_name_that_matches_nothing_lists_what_there_is(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        limit(ResNet18(width=8), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": ()}, r"model\.train names no part"),
        ({"adapter_rank": 4}, r"model\.adapter_rank is for adapters: set model\.adapter=lora too"),
        ({**LORA, "adapter_targets": ()}, r"model\.adapter_targets names no part"),
        ({"freeze": True, "train": ("head",)}, r"freezes the whole encoder: leave it out, or model\.train"),
        ({"freeze": True, **LORA}, r"freezes the whole encoder: leave it out, or model\.adapter"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig(**settings)


def test_the_base_of_an_adapted_network_is_that_of_the_same_seed_without_adapters() -> None:
    plain, adapted = (make_image_builder(ModelConfig(**settings), 3, 3, 0).encoder() for settings in ({}, LORA))
    assert isinstance(adapted, PartialEncoder)
    for name, tensor in plain.state_dict().items():
        base = name.replace("weight", "parametrizations.weight.original") if name[:2] in ("co", "fc") else name
        assert torch.equal(adapted.network.state_dict()[base], tensor), name
    again, other = (make_image_builder(ModelConfig(**LORA), 3, 3, seed).encoder() for seed in (0, 1))
    down = "network.fc.parametrizations.weight.0.down"
    assert torch.equal(again.state_dict()[down], adapted.state_dict()[down])
    assert not torch.equal(other.state_dict()[down], adapted.state_dict()[down])


def test_names_of_an_efficientnet_are_those_of_its_own_layers() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    settings = ModelConfig(name="efficientnet-lite0", train=("_blocks.15", "_conv_head"), adapter="lora")
    classifier = make_image_builder(settings, 3, 3, 0, 32).classifier().train()
    trained = {name for name, p in classifier.named_parameters() if p.requires_grad and ".0." not in name}
    assert any("_blocks.15._project_conv.weight" in name for name in trained)
    adapters = [name for name, _ in classifier.named_parameters() if name.endswith("0.up")]
    assert any("_blocks.3._expand_conv" in name for name in adapters)
    assert not any("_depthwise_conv" in name or "_blocks.15" in name for name in adapters)
    classifier(images(2)).sum().backward()
    with pytest.raises(InputError, match=r"no part '_block'; choose from _conv_stem, _bn0, _blocks.0 to _blocks.15, "):
        make_image_builder(ModelConfig(name="efficientnet-lite0", train=("_block",)), 3, 3, 0, 32).encoder()
