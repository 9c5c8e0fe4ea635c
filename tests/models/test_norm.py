import pytest
import torch
from torch import Tensor, nn

from fedcir.errors import InputError
from fedcir.models.networks import CNN, ResNet18
from fedcir.models.normalisation import InstanceNorm, count_groups, make_norm

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def maps(*shape: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Random ones whose mean is far from 0, which a variance of squares alone does not survive."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (2 * drawn + 30).contiguous(memory_format=layout)


def with_affine(layer: nn.Module, channels: int) -> nn.Module:
    layer.load_state_dict({"weight": torch.linspace(-1, 2, channels), "bias": torch.linspace(0, 1, channels)})
    return layer


def test_instance_norm_by_hand() -> None:
    x = torch.tensor([1.0, 3.0]).view(1, 1, 1, 2)  # mean 2, variance 1
    layer = InstanceNorm(1, eps=0.0)
    layer.load_state_dict({"weight": torch.tensor([5.0]), "bias": torch.tensor([0.5])})
    assert layer(x).flatten().tolist() == [-4.5, 5.5]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", [3, 8, 32])
def test_instance_norm_is_torchs_in_both_layouts(side: int, layout: torch.memory_format) -> None:
    own, torchs = (with_affine(layer, 5) for layer in (InstanceNorm(5), nn.InstanceNorm2d(5, affine=True)))
    inputs = [maps(4, 5, side, side, layout=layout).requires_grad_() for _ in range(2)]
    outputs = [layer(x) for layer, x in zip((own, torchs), inputs, strict=True)]
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    slope = maps(4, 5, side, side, layout=layout).sin()
    for y in outputs:
        y.backward(slope)
    pairs = zip((inputs[0], *own.parameters()), (inputs[1], *torchs.parameters()), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5 * side, rtol=1e-5)


def test_instance_norm_keeps_the_layout() -> None:
    for layout in LAYOUTS:
        x = maps(2, 3, 4, 4, layout=layout).requires_grad_()
        y = InstanceNorm(3)(x)
        y.sum().backward()
        assert x.grad is not None
        assert y.is_contiguous(memory_format=layout)
        assert x.grad.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_instance_norm_is_that_of_differences(layout: torch.memory_format) -> None:
    layer = with_affine(InstanceNorm(3), 3).double()
    x = maps(2, 3, 2, 3, layout=layout).double().requires_grad_()

    def output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    parameters = [p.detach().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(output, (x, *parameters))


def test_an_images_contrast_and_colour_do_not_pass_instance_norm() -> None:
    x = maps(2, 3, 8, 8, layout=torch.channels_last)
    other = x * torch.tensor([0.5, 2.0, 3.0])[:, None, None] + torch.tensor([1.0, -1.0, 4.0])[:, None, None]
    torch.testing.assert_close(InstanceNorm(3)(x), InstanceNorm(3)(other), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 3, 4, 4), (2, 3, 2, 2, 2)])
def test_instance_norm_takes_maps_of_any_dimensions(shape: tuple[int, ...]) -> None:
    y = InstanceNorm(3)(maps(*shape)).flatten(2)
    torch.testing.assert_close(y.mean(-1), torch.zeros(2, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var(-1, correction=0), torch.ones(2, 3), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 1, 1)])
def test_instance_norm_of_a_single_value_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"two values or more, got .*: take larger images"):
        InstanceNorm(3)(torch.zeros(shape))


def test_groups_are_of_about_sixteen_channels() -> None:
    assert [count_groups(channels) for channels in (1, 7, 16, 24, 32, 48, 56, 128)] == [1, 1, 1, 1, 2, 3, 2, 8]


def test_invariant_is_instance_norm_in_the_first_stage_and_group_norm_after_it() -> None:
    def instance(network: nn.Module) -> list[str]:
        return [name for name, module in network.named_modules() if isinstance(module, InstanceNorm)]

    layer1 = [f"layer1.{block}.bn{number}" for block in (0, 1) for number in (1, 2)]
    assert instance(CNN(norm="invariant")) == ["norms.0"]
    assert instance(ResNet18(norm="invariant")) == ["bn1", *layer1]
    for network in (CNN(norm="invariant"), ResNet18(width=16, norm="invariant")):
        assert not list(network.buffers())  # nothing of the data is kept
        assert sum(isinstance(module, nn.GroupNorm) for module in network.modules()) in (3, 20)


def test_norms_have_as_many_parameters_as_batch_norm() -> None:
    for kind in ("group", "invariant"):
        for first in (True, False):
            assert [p.shape for p in make_norm(kind, 32, first).parameters()] == [(32,), (32,)]
