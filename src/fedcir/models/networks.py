"""Encoders of images and of vectors, the ends of stages, and matmul convolutions for small feature maps."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise, starmap
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedcir.errors import InputError
from fedcir.models.normalisation import make_norm

RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))  # inverse of the factor by which a ReLU reduces the standard deviation


def make_conv(norm: str, channels_in: int, channels: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    """Make a convolution that a norm of this kind follows."""
    if norm == "standardised":
        return StandardisedConv(channels_in, channels, kernel, stride, padding)
    return nn.Conv2d(channels_in, channels, kernel, stride, padding, bias=False)  # the norm has a bias


class StandardisedConv(nn.Conv2d):
    """A convolution by weights of mean 0 and variance 1 / fan-in for each output channel, times the gain for ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, standardise_weight(self.weight), self.bias, self.stride, self.padding)


def standardise_weight(weight: Tensor) -> Tensor:
    centred = weight - weight.mean((1, 2, 3), keepdim=True)
    variance = centred.square().mean((1, 2, 3), keepdim=True)
    return centred * (variance + 1e-6).rsqrt() * (RELU_GAIN / math.sqrt(weight[0].numel()))


GRID = 4  # the side of the last feature map
MIN_IMAGE_SIZE = 8  # three poolings leave one pixel


class CNN(nn.Module):
    """Three blocks of convolution, normalisation, pooling and ReLU, then a linear layer. (B, C, H, W) -> (B, 128)."""

    features = 128

    def __init__(self, channels: int = 3, width: int = 16, norm: str = "batch") -> None:
        super().__init__()
        widths = [channels, width, 2 * width, 4 * width]
        self.convs = nn.ModuleList(make_conv(norm, a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(make_norm(norm, b, first=b == width) for b in widths[1:])
        self.ends = nn.ModuleList(nn.Identity() for _ in widths[1:])  # for methods that hook the output of a block
        self.fc = nn.Linear(GRID * GRID * widths[-1], self.features)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm, end in zip(self.convs, self.norms, self.ends, strict=True):
            # pooling before the ReLU gives the same values at a quarter of the cost
            x = end(F.relu(F.max_pool2d(norm(conv(x)), 2), inplace=True))
        if x.shape[-2:] != (GRID, GRID):  # images of 32 pixels need no pooling
            x = F.adaptive_avg_pool2d(x, GRID)
        return F.relu(self.fc(torch.flatten(x, 1)), inplace=True)


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int, norm: str, first: bool) -> None:
        super().__init__()
        self.conv1 = make_conv(norm, channels_in, channels, 3, stride, 1)
        self.bn1 = make_norm(norm, channels, first)
        self.conv2 = make_conv(norm, channels, channels, 3, 1, 1)
        self.bn2 = make_norm(norm, channels, first)
        self.grows = norm == "standardised"
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                make_conv(norm, channels_in, channels, 1, stride), make_norm(norm, channels, first)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        total = self.bn2(self.conv2(x)) + shortcut
        if self.grows:  # the sum of two has twice the variance
            total = total * math.sqrt(0.5)
        return F.relu(total, inplace=True)


class ResNet18(nn.Module):
    """Maps (B, C, H, W) to (B, 8 * width)."""

    def __init__(self, channels: int = 3, width: int = 64, norm: str = "batch") -> None:
        super().__init__()
        self.features = 8 * width
        self.conv1 = make_conv(norm, channels, width, 7, 2, 3)
        self.bn1 = make_norm(norm, width, first=True)
        self.stem = nn.Identity()  # for methods that hook the output of a stage
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(BasicBlock(a, b, 1 if first else 2, norm, first), BasicBlock(b, b, 1, norm, first))
            for (a, b), first in zip(pairwise(widths), (True, False, False, False), strict=True)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)


class MLP(nn.Module):
    """Two linear layers, each with a ReLU, on flattened inputs. (B, ...) -> (B, width)."""

    def __init__(self, inputs: int, width: int = 64) -> None:
        super().__init__()
        self.features = width
        self.hidden = nn.Linear(inputs, width)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.last(F.relu(self.hidden(torch.flatten(x, 1)))))


class Flat(nn.Module):
    """Flatten inputs: the head on them is logistic regression. (B, ...) -> (B, inputs)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.features = inputs

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(x, 1)


POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)  # they follow the last stage


class FeatureStatistics(nn.ModuleList):
    """Running means of each channel's mean and standard deviation within an image, for each stage."""

    def __init__(self, channels: Mapping[str, int]) -> None:
        super().__init__(StageStatistics(count) for count in channels.values())
        self.places = tuple(channels)


class StageStatistics(nn.Module):
    """Running means of one stage."""

    mean: Tensor
    std: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    @torch.no_grad()
    def update(self, mean: Tensor, std: Tensor, momentum: float) -> None:
        """Move towards the mean over a batch, (B, C) each."""
        self.mean.lerp_(mean.mean(0), 1 - momentum)
        self.std.lerp_(std.mean(0), 1 - momentum)


def find_stage_ends(encoder: nn.Module, example: Tensor) -> dict[str, int]:
    """Find the modules that end the stages of an encoder, by name, and their numbers of channels.

    A stage begins with a module that holds a convolution. Its end is the last module before the next stage whose output
    has maps. An encoder without convolutions is one stage, whose features are its channels.
    """
    copied = copy.deepcopy(encoder).eval()
    parts = dict(_list_parts(copied))
    passed: list[tuple[str, Any]] = []
    for name, part in parts.items():
        part.register_forward_hook(lambda _, inputs, output, name=name: passed.append((name, output)))
    with torch.no_grad():
        features = copied(example)
    once = [name for name, _ in passed]
    ends: dict[int, tuple[str, int]] = {}
    stage = 0
    for name, output in passed:
        stage += _convolves(parts[name])
        images = isinstance(output, Tensor) and output.ndim in (4, 5) and not isinstance(parts[name], POOLS)
        if stage and images and once.count(name) == 1:
            ends[stage] = name, output.shape[1]
    return dict(ends.values()) or {"": features.shape[1]}


@contextmanager
def transform_stages(
    encoder: nn.Module, places: Sequence[str], change: Callable[[int, Tensor], Tensor]
) -> Iterator[None]:
    """Within the context, pass the output of each of these modules through `change`, with the module's number."""
    with ExitStack() as hooks:
        for number, name in enumerate(places):
            hook = partial(lambda number, _, inputs, output: change(number, output), number)
            hooks.enter_context(encoder.get_submodule(name).register_forward_hook(hook))
        yield


class StagedEncoder(nn.Module):
    """An encoder whose features are followed by the averaged maps of its last stages before them.

    Consecutive stage ends of one number of channels count as one stage.
    """

    def __init__(self, encoder: nn.Module, example: Tensor, stages: int) -> None:
        super().__init__()
        self.encoder = encoder
        ends = list(find_stage_ends(encoder, example).items())
        last = [name for (name, width), (_, after) in pairwise(ends) if width != after]
        if len(last) < stages:
            raise InputError(f"model.stages is {stages}, but the encoder has {len(last)} stages before its features")
        self.names = last[len(last) - stages :]

    def forward(self, x: Tensor) -> Tensor:
        pooled: list[Tensor] = []

        def collect(number: int, maps: Tensor) -> Tensor:
            pooled.append(maps.flatten(2).mean(2))
            return maps

        with transform_stages(self.encoder, self.names, collect):
            features = self.encoder(x)
        return torch.cat([features, *pooled], dim=1)  # (B, F)

    def extra_repr(self) -> str:
        """Name the stages: the key of cached features contains this text."""
        return f"stages={self.names}"


def _list_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children; those of a ModuleList, or of the only child that convolves, replace it."""
    children = dict(module.named_children())
    inner = [name for name, child in children.items() if _convolves(child)]
    for name, child in children.items():
        only = inner == [name] and not isinstance(child, _ConvNd)
        if only or isinstance(child, nn.ModuleList):
            yield from _list_parts(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(layer, _ConvNd) for layer in module.modules())


MATMUL_CHANNELS = 64
"""Channels for each pixel of a map's side from which matrix products are faster than torch's convolution."""


KernelSpan = tuple[int, slice, slice]
"""A kernel position, the output positions that it contributes to, and the input positions that it reads there."""


def use_matmul_conv(network: nn.Module) -> None:
    """Replace the plain convolutions of a network by MatmulConv2d, in place. Tensors and names stay the same."""
    for layer in network.modules():
        if type(layer) is nn.Conv2d:
            plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
            large = layer.in_channels >= MATMUL_CHANNELS and layer.kernel_size > (1, 1)
            if plain and large and not isinstance(layer.padding, str):
                layer.__class__ = MatmulConv2d


def use_standard_conv(network: nn.Module) -> None:
    """Undo `use_matmul_conv`."""
    for layer in network.modules():
        if type(layer) is MatmulConv2d:
            layer.__class__ = nn.Conv2d  # type: ignore[assignment]


class MatmulConv2d(nn.Conv2d):
    """nn.Conv2d that uses matrix products where they are faster: training, CPU, channels_last, small maps."""

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self._is_supported(x)):
            return super().forward(x)
        sides = zip(x.shape[2:], self.kernel_size, self.stride, cast(tuple[int, int], self.padding), strict=True)
        (height, rows), (width, columns) = starmap(kernel_spans, sides)
        if height * width * MATMUL_CHANNELS**2 > self.in_channels**2:
            return super().forward(x)
        y = cast(Tensor, _MatmulConv.apply(x, self.weight, (height, width), rows, columns))  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias[:, None, None]

    def _is_supported(self, x: Tensor) -> bool:
        weight = self.weight
        channels_last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
        plain = x.ndim == 4 and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
        transformed = torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()
        return channels_last and plain and not transformed and not torch.is_autocast_enabled("cpu")


def kernel_spans(size: int, kernel: int, stride: int, padding: int) -> tuple[int, list[KernelSpan]]:
    """Output size along one side, and the kernel positions that meet any input of this size."""
    out = (size + 2 * padding - kernel) // stride + 1
    spans = []
    for position in range(kernel):
        offset = position - padding  # of the input's position to the output's times the stride
        first, end = max(0, -(offset // stride)), min(out, (size - 1 - offset) // stride + 1)
        if first < end:
            start = first * stride + offset
            spans.append((position, slice(first, end), slice(start, start + (end - first - 1) * stride + 1, stride)))
    return out, spans


class _MatmulConv(torch.autograd.Function):
    """Convolution of inputs (B, H, W, C) with weights (O, H, W, C)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, size: tuple[int, int], rows: list[KernelSpan], columns: list[KernelSpan]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.columns = rows, columns
        inputs, weights = x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1)
        # Not a view, since activations in place need a tensor of its own.
        y = torch.empty(len(x), len(weight), *size, dtype=x.dtype, memory_format=torch.channels_last).zero_()
        outputs = y.permute(0, 2, 3, 1)
        for i, to_row, row in rows:
            for j, to_column, column in columns:
                outputs[:, to_row, to_column] += inputs[:, row, column] @ weights[:, i, j].T
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        inputs, weights, slopes = (tensor.permute(0, 2, 3, 1) for tensor in (x, weight, slope))
        to_weights = torch.zeros_like(weights)
        to_inputs = torch.zeros_like(inputs, memory_format=torch.contiguous_format)
        wanted = ctx.needs_input_grad[0]
        for i, to_row, row in ctx.rows:
            for j, to_column, column in ctx.columns:
                part = slopes[:, to_row, to_column]  # (B, h, w, O)
                met = inputs[:, row, column]  # (B, h, w, C)
                to_weights[:, i, j] = part.flatten(0, 2).T @ met.flatten(0, 2)
                if wanted:
                    to_inputs[:, row, column] += part @ weights[:, i, j]
        return to_inputs.permute(0, 3, 1, 2) if wanted else None, to_weights.permute(0, 3, 1, 2), None, None, None
