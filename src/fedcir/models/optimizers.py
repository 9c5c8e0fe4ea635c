"""SGD and Adam over torch's functional forms, and the other optimisers of torch.optim by name.

The classes in torch.optim import torch's compiler when they are constructed: two seconds and 90 MB per process.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from inspect import signature
from itertools import starmap
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedcir.errors import InputError, suggest_name
from fedcir.types import Tensors

UNSUITED = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
"""Classes of torch.optim that cannot take plain steps on all tensors of a network."""


class LocalOptimizer(Protocol):
    """Optimiser of local steps, whose state starts anew in each round."""

    parameters: list[Tensor]

    def restart(self) -> None: ...

    def zero_grad(self) -> None: ...

    def step(self, lr: float, momentum: float, weight_decay: float) -> None: ...

    def with_parameters(self, parameters: Iterable[Tensor]) -> "LocalOptimizer": ...


@dataclass(frozen=True)
class RoundOptimizer:
    """An optimiser with the settings of one round."""

    optimizer: LocalOptimizer
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Clip the gradients, and make a step along them; parameters without one are unchanged."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.optimizer.parameters, self.clip_norm)
        self.optimizer.step(self.lr, self.momentum, self.weight_decay)

    def with_parameters(self, parameters: Iterable[Tensor]) -> "RoundOptimizer":
        """Make an optimiser of other parameters with the same settings, and a state of its own."""
        return replace(self, optimizer=self.optimizer.with_parameters(parameters))


def make_optimizer(name: str, parameters: Iterable[Tensor]) -> LocalOptimizer:
    """Make the optimiser of local steps that `local.optimizer` names."""
    return SGD(parameters) if name.lower() == "sgd" else TorchOptimizer(find_optimizer(name), parameters)


def find_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """Find a class of torch.optim by its name in any case."""
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and key not in UNSUITED
    }
    if name.lower() not in classes:
        raise InputError(f"local.optimizer cannot be {name!r}; {suggest_name(name.lower(), classes)}")
    return classes[name.lower()]


class SGD:
    """SGD with momentum; `restart` sets its buffers to zero."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._momenta = [torch.zeros_like(parameter) for parameter in self.parameters]

    def restart(self) -> None:
        for momentum in self._momenta:
            momentum.zero_()
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float, momentum: float, weight_decay: float) -> None:
        """Make a step along the gradients; parameters without one are unchanged."""
        moved = [(p, p.grad, m) for p, m in zip(self.parameters, self._momenta, strict=True) if p.grad is not None]
        parameters, gradients, momenta = (list(column) for column in zip(*starmap(_align, moved), strict=True))
        rates: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dampening": 0.0}
        sgd(parameters, gradients, momenta, fused=True, nesterov=False, maximize=False, **rates)

    def with_parameters(self, parameters: Iterable[Tensor]) -> "SGD":
        return SGD(parameters)


class TorchOptimizer:
    """An optimiser of torch.optim with its default settings, besides rate, momentum and weight decay."""

    def __init__(self, kind: type[torch.optim.Optimizer], parameters: Iterable[Tensor]) -> None:
        self.kind, self.parameters = kind, [parameter for parameter in parameters if parameter.requires_grad]
        self._optimizer: torch.optim.Optimizer | None = None

    def restart(self) -> None:
        self._optimizer = None
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, lr: float, momentum: float, weight_decay: float) -> None:
        if self._optimizer is None:
            known = signature(self.kind).parameters
            values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
            settings: dict[str, Any] = {name: value for name, value in values.items() if name in known}
            self._optimizer = self.kind(self.parameters, **settings)
        self._optimizer.step()

    def with_parameters(self, parameters: Iterable[Tensor]) -> "TorchOptimizer":
        return TorchOptimizer(self.kind, parameters)


def _align(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three in one memory layout; those in channels_last as contiguous views.

    torch's fused SGD on a CPU ignores strides, so it is wrong if a gradient has another layout than its parameter.
    Tensors that are not contiguous it copies, which takes longer than the step itself.
    """
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    last = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    if not last or parameter.is_contiguous():
        return parameter, gradient, momentum
    return parameter.permute(0, 2, 3, 1), gradient.permute(0, 2, 3, 1), momentum.permute(0, 2, 3, 1)


class Adam:
    """Adam with its usual constants. Its state is a dict of tensors: "3.exp_avg" is a moment of parameter 3."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, state: Tensors, weight_decay: float = 0.0) -> None:
        """Continue from the state of an earlier one; an empty state starts anew."""
        self.parameters, self.lr, self.weight_decay = list(parameters), lr, weight_decay
        self.state: Tensors = {}
        for index, parameter in enumerate(self.parameters):
            for name, like in (("step", torch.zeros(())), ("exp_avg", parameter), ("exp_avg_sq", parameter)):
                key = f"{index}.{name}"
                self.state[key] = state[key].clone() if key in state else torch.zeros_like(like)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        numbers = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        gradients = [gradient for n in numbers if (gradient := self.parameters[n].grad) is not None]
        averages, squares, steps = (
            [self.state[f"{n}.{name}"] for n in numbers] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        rates: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay, "beta1": 0.9, "beta2": 0.999}
        modes: dict[str, Any] = {"eps": 1e-8, "foreach": False, "amsgrad": False, "maximize": False}
        adam([self.parameters[n] for n in numbers], gradients, averages, squares, [], steps, **rates, **modes)
