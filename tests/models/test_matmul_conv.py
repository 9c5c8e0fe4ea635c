"""Matmul convolutions are torch's own, forwards and backwards, and only where they pay."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from fedcir.models.networks import MatmulConv2d, ResNet18, _MatmulConv, kernel_spans, use_matmul_conv, use_standard_conv

LAST = torch.channels_last


def convolution(channels: int, filters: int, kernel: int, stride: int, padding: int, bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, filters, kernel, stride, padding, bias=bias)
    return layer.to(memory_format=LAST)  # type: ignore[call-overload,no-any-return]


def test_kernel_positions_that_only_meet_padding_are_left_out() -> None:
    # two pixels, padded to four: the first position meets the first pixel from the second output, and so on
    assert kernel_spans(2, kernel=3, stride=1, padding=1) == (
        2,
        [(0, slice(1, 2), slice(0, 1, 1)), (1, slice(0, 2), slice(0, 2, 1)), (2, slice(0, 1), slice(1, 2, 1))],
    )
    assert kernel_spans(1, kernel=3, stride=1, padding=1) == (1, [(1, slice(0, 1), slice(0, 1, 1))])


GEOMETRIES = [*product([3], [1, 2, 3], [0, 1, 2]), (5, 2, 2), (2, 2, 0), (2, 1, 1)]
CASES = [
    (size, *each)
    for size, each in product([(1, 1), (2, 2), (3, 3), (4, 3), (1, 4)], GEOMETRIES)
    if min(size) + 2 * each[2] >= each[0]
]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding"), CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_torch(
    size: tuple[int, int], kernel: int, stride: int, padding: int, bias: bool
) -> None:
    plain = convolution(128, 6, kernel, stride, padding, bias)
    matmul = copy.deepcopy(plain)
    use_matmul_conv(matmul)
    assert type(matmul) is MatmulConv2d
    x = torch.randn(3, 128, *size).contiguous(memory_format=LAST)
    results = []
    for layer in (plain, matmul):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = layer(given)
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
        results.append([y, given.grad, *(parameter.grad for parameter in layer.parameters())])
    if not bias:
        assert ("_MatmulConv" in str(results[1][0].grad_fn)) == (results[0][0].shape[2:].numel() <= 4)
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert matmul.weight.grad is not None
    assert matmul.weight.grad.stride() == matmul.weight.stride()


def test_a_residual_network_trains_to_nearly_the_same() -> None:
    torch.manual_seed(0)
    plain = ResNet18(width=16).to(memory_format=LAST)  # type: ignore[call-overload]
    matmul = copy.deepcopy(plain)
    use_matmul_conv(matmul)
    assert sum(type(layer) is MatmulConv2d for layer in matmul.modules()) == 7  # those of 64 channels or more
    assert list(matmul.state_dict()) == list(plain.state_dict())
    x = torch.randn(4, 3, 32, 32).contiguous(memory_format=LAST)
    for network in (plain, matmul):
        network(x).square().mean().backward()
    for mine, theirs in zip(matmul.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(48, 48, 3, padding=1),
        nn.Conv2d(128, 128, 1),
        nn.Conv2d(128, 128, 3, padding="same"),
        nn.Conv2d(128, 128, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(128, 128, 3, padding=1, groups=2),
        nn.Conv2d(128, 128, 3, padding=2, dilation=2),
        type("Own", (nn.Conv2d,), {})(128, 128, 3, padding=1),
    ],
    ids=["few channels", "1x1 kernel", "same", "reflect", "groups", "dilation", "of the user"],
)
def test_other_convolutions_stay_as_they_are(layer: nn.Conv2d) -> None:
    before = type(layer)
    use_matmul_conv(layer)
    assert type(layer) is before


def test_what_does_not_pay_or_cannot_be_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = convolution(128, 4, 3, 1, 1)
    use_matmul_conv(layer)
    used = []
    monkeypatch.setattr("fedcir.models.networks._MatmulConv.apply", lambda *given: used.append(given))
    small, large = torch.randn(2, 128, 2, 2), torch.randn(2, 128, 3, 3)
    layer(large)
    with torch.no_grad():
        layer(small)
    with torch.autocast("cpu", torch.bfloat16):
        layer(small)
    torch.func.vmap(lambda one: layer(one[None]))(small)
    layer.double()(small.double())
    layer.float().to(memory_format=torch.contiguous_format)(small)  # type: ignore[call-overload]
    assert used == []


def test_what_follows_may_work_in_place() -> None:
    layer = convolution(128, 4, 3, 1, 1, bias=False)
    plain, matmul = (nn.Sequential(copy.deepcopy(layer), nn.ReLU(inplace=True)) for _ in range(2))
    use_matmul_conv(matmul)
    x = torch.randn(2, 128, 2, 2)
    for network in (plain, matmul):
        network(x).sum().backward()
    torch.testing.assert_close(matmul[0].weight.grad, plain[0].weight.grad, rtol=1e-4, atol=1e-4)


def test_the_gradient_can_be_differentiated_again() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 2, 2), (2, 3, 3, 3)))
    size, spans = kernel_spans(2, kernel=3, stride=1, padding=1)
    assert torch.autograd.gradgradcheck(
        lambda *given: _MatmulConv.apply(*given, (size, size), spans, spans), (x, weight)
    )


def test_matmul_conv_can_be_undone() -> None:
    layer = convolution(128, 4, 3, 1, 1)
    use_matmul_conv(layer)
    use_standard_conv(layer)
    assert type(layer) is nn.Conv2d
