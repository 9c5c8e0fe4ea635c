"""Files of users for tests of the command line, and what a refusal of wrong input looks like."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Command = Callable[..., Any]

MINE = '''"""Mine: FedAvg that stays near the global model."""

from dataclasses import dataclass

import fedcir
from fedcir import Losses


@dataclass(frozen=True)
class Mine(fedcir.FedAvg):
    """Nobody, 2024. https://example.org"""

    mu: float = 0.1
    """Weight of the proximal term."""

    def local_loss(self, modules, x, y, ctx):
        losses = super().local_loss(modules, x, y, ctx)
        anchor = ctx.broadcast["model"]
        near = 0.5 * sum(((p - anchor[name]) ** 2).sum() for name, p in modules["model"].named_parameters())
        return Losses(losses.total + self.mu * near, {**losses.terms, "near": near})
'''


def arrays(root: Path, **domains: dict[str, Any]) -> Path:
    """A folder of domains with the labels given, of which the test set holds each once."""
    root.mkdir()
    for name, labels in domains.items():
        train, test = np.asarray(labels), np.unique(labels)
        images = [np.zeros((len(y), 8, 8, 3), np.uint8) for y in (train, test)]
        np.savez(root / f"{name}.npz", x_train=images[0], y_train=train, x_test=images[1], y_test=test)
    return root


def check_refused(message: Any, named: list[str]) -> None:
    """One line that names what was wrong, exit code 2, and nothing of a parser's or a traceback's."""
    assert message.code == 2
    assert message.out == ""
    assert message.err.startswith("fedcir: ")
    assert message.err.endswith("\n")
    assert message.err.count("\n") == 1
    assert "Traceback" not in message.err
    assert "Usage" not in message.err
    assert "╭" not in message.err
    for name in named:
        assert name in message.err
