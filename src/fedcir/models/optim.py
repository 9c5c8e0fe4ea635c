"""SGD and Adam over torch's own functional forms.

The classes in torch.optim do the same but import torch's compiler when they are made: two seconds and 90 MB a process.
"""

from collections.abc import Iterable
from itertools import starmap

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedcir.types import Arrays


class SGD:
    """SGD with momentum. The buffers live as long as the object; `restart` makes them zero."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
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
        """One step along the gradients; a parameter without one stays as it is."""
        moved = [(p, p.grad, m) for p, m in zip(self.parameters, self._momenta, strict=True) if p.grad is not None]
        parameters, gradients, momenta = (list(each) for each in zip(*starmap(_as_stored, moved), strict=True))
        sgd(
            parameters,
            gradients,
            momenta,
            fused=True,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def _as_stored(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three alike in memory, and contiguous where they lie in channels_last: as views, if they can be.

    torch's fused SGD on a CPU goes through memory as it comes, so it is wrong for a gradient in another layout than its
    parameter's. What is not contiguous it copies, which takes longer than the step itself.
    """
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    last = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    if not last or parameter.is_contiguous():
        return parameter, gradient, momentum
    return parameter.permute(0, 2, 3, 1), gradient.permute(0, 2, 3, 1), momentum.permute(0, 2, 3, 1)


class Adam:
    """Adam with its usual constants. Its state is a bag: the moments of parameter 3 are "3.exp_avg" and so on."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, state: Arrays, weight_decay: float = 0.0) -> None:
        """An empty bag is a fresh start; another is the state that an earlier one ended in."""
        self.parameters, self.lr, self.weight_decay = list(parameters), lr, weight_decay
        self.state: Arrays = {}
        for index, parameter in enumerate(self.parameters):
            for name, fresh in (
                ("step", torch.zeros(())),
                ("exp_avg", torch.zeros_like(parameter)),
                ("exp_avg_sq", torch.zeros_like(parameter)),
            ):
                self.state[f"{index}.{name}"] = state.get(f"{index}.{name}", fresh).clone()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        numbers = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        adam(
            [self.parameters[n] for n in numbers],
            [gradient for n in numbers if (gradient := self.parameters[n].grad) is not None],
            [self.state[f"{n}.exp_avg"] for n in numbers],
            [self.state[f"{n}.exp_avg_sq"] for n in numbers],
            [],
            [self.state[f"{n}.step"] for n in numbers],
            foreach=False,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
        )
