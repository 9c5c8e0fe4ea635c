import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from fedcir.errors import InputError
from fedcir.models import renormalise
from fedcir.models.networks import CNN, ResNet18
from fedcir.models.normalisation import InstanceNorm

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def block(channels_in: int, channels: int, pool: bool = False) -> nn.Sequential:
    shrunk = [nn.MaxPool2d(2)] if pool else []
    return nn.Sequential(*shrunk, nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())


def kinds(module: nn.Module) -> list[str]:
    """I for InstanceNorm, G for GroupNorm, B for BatchNorm, as they were defined."""
    norms = (nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
    return [type(m).__name__[0] for m in module.modules() if isinstance(m, norms)]


def spread_out(module: nn.Module) -> nn.Module:
    """The same with other weights and biases than 1 and 0 in its norms, as training leaves them."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(layer.weight, 0.5, 2.0)
            nn.init.uniform_(layer.bias, -1.0, 1.0)
    return module


@pytest.mark.parametrize("backbone", [CNN, ResNet18])
@pytest.mark.parametrize("kind", ["invariant", "group"])
def test_our_own_networks_become_those_of_that_norm(backbone: type[CNN] | type[ResNet18], kind: str) -> None:
    before = spread_out(backbone(width=16))
    after = renormalise(before, IMAGES, kind)  # type: ignore[arg-type]
    same = backbone(width=16, norm=kind)
    same.load_state_dict(after.state_dict())  # by name
    assert str(after) == str(same)
    assert torch.equal(after(IMAGES), same(IMAGES))
    assert all(torch.equal(tensor, before.state_dict()[name]) for name, tensor in after.state_dict().items())


def test_the_network_itself_is_left_alone() -> None:
    before = block(3, 4).train()
    weights = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    after = renormalise(before, IMAGES)
    nn.init.zeros_(after[1].weight)
    assert kinds(before) == ["B"]
    assert all(module.training for module in (*before.modules(), *after.modules()))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in before.state_dict().items())


def test_the_first_stage_of_a_vgg_is_what_comes_before_its_first_pooling() -> None:
    vgg = nn.Sequential(block(3, 8), block(8, 8), block(8, 16, pool=True), block(16, 16), block(16, 32, pool=True))
    assert kinds(renormalise(vgg, IMAGES)) == ["I", "I", "G", "G", "G"]


def test_bottlenecks_are_in_the_first_stage_whole() -> None:
    stem, layer1 = block(3, 8), [block(8, 8, pool=True), block(8, 8), block(8, 32), block(32, 8), block(8, 32)]
    network = nn.Sequential(stem, *layer1, block(32, 16, pool=True), block(16, 64))
    assert kinds(renormalise(network, IMAGES)) == ["I"] * 6 + ["G"] * 2


def test_a_network_of_one_width_has_its_first_map_size_as_its_first_stage() -> None:
    network = nn.Sequential(block(3, 8), block(8, 8), block(8, 8, pool=True), block(8, 8, pool=True))
    assert kinds(renormalise(network, IMAGES)) == ["I", "I", "G", "G"]


class DenseLayer(nn.Module):
    """As in DenseNet: norms come before convolutions, and inputs are kept beside outputs."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm2, self.conv2 = nn.BatchNorm2d(2 * growth), nn.Conv2d(2 * growth, growth, 3, padding=1)
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 2 * growth, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv2(self.norm2(self.conv1(self.norm1(x)).relu()).relu())], dim=1)


def test_the_first_dense_block_is_a_densenets_first_stage() -> None:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    transition = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.AvgPool2d(2))
    network = nn.Sequential(stem, DenseLayer(8, 4), DenseLayer(12, 4), transition, DenseLayer(8, 4), nn.BatchNorm2d(12))
    after = renormalise(spread_out(network), IMAGES)
    assert kinds(after) == ["I"] * 6 + ["G"] * 3
    assert after(IMAGES).shape == network(IMAGES).shape
    assert after(IMAGES).isfinite().all()


def test_the_caller_can_say_how_many_layers_are_the_first_stage() -> None:
    network = nn.Sequential(block(3, 8), block(8, 16), block(16, 32))
    for first in range(4):
        assert kinds(renormalise(network, IMAGES, first=first)) == ["I"] * first + ["G"] * (3 - first)
    with pytest.raises(InputError, match="first must be at least 0, got -1"):
        renormalise(network, IMAGES, first=-1)


def test_a_layer_whose_map_is_a_single_value_gets_group_norm() -> None:
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), block(3, 8), nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6))
    for first in (None, 2):
        after = renormalise(network, IMAGES, first=first)
        assert kinds(after) == ["G", "G"]
    assert after(IMAGES).std() > 0


@pytest.mark.parametrize("dimensions", [1, 3])
def test_sequences_and_volumes_are_renormalised_too(dimensions: int) -> None:
    conv, norm = (nn.Conv1d, nn.BatchNorm1d) if dimensions == 1 else (nn.Conv3d, nn.BatchNorm3d)
    network = nn.Sequential(conv(2, 4, 3), norm(4), nn.ReLU(), conv(4, 8, 3, stride=2), norm(8))
    x = torch.randn(2, 2, *[9] * dimensions)
    after = renormalise(network, x)
    assert kinds(after) == ["I", "G"]
    assert after(x).shape == network(x).shape


class BatchNormAct2d(nn.BatchNorm2d):
    """As in timm: a BatchNorm that is followed by what it holds."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


def test_what_a_batch_norm_holds_comes_after_its_replacement() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4))
    x = network[0](IMAGES)
    assert torch.equal(renormalise(network, IMAGES)(IMAGES), InstanceNorm(4)(x).relu())


def test_a_layer_that_stands_in_two_places_still_does() -> None:
    shared = nn.BatchNorm2d(3)
    after = renormalise(nn.Sequential(shared, nn.ReLU(), shared), IMAGES)
    assert after[0] is after[2]
    assert isinstance(after[0], InstanceNorm)


def test_a_layer_without_weight_and_bias_stays_without() -> None:
    after = renormalise(nn.Sequential(nn.BatchNorm2d(3, eps=1e-3, affine=False)), IMAGES)
    assert (after[0].weight, after[0].eps) == (None, 1e-3)
    assert after(IMAGES).isfinite().all()


def test_a_layer_that_the_example_does_not_run_through_gets_group_norm() -> None:
    class Unused(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](x)

    assert kinds(renormalise(Unused(nn.BatchNorm2d(3), nn.BatchNorm2d(3)), IMAGES)) == ["G", "I"]


def test_a_network_without_batch_norm_is_an_error() -> None:
    with pytest.raises(InputError, match="Sequential has no BatchNorm layers to replace"):
        renormalise(nn.Sequential(nn.ReLU()), IMAGES)
    with pytest.raises(InputError, match="kind must be invariant or group, got 'layer'"):
        renormalise(block(3, 4), IMAGES, "layer")  # type: ignore[arg-type]


def test_importing_the_package_does_not_import_it() -> None:
    code = "import fedcir, sys; sys.exit('torch' in sys.modules or 'fedcir.models' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
