"""Train one classifier across sites whose data look different, without moving the data.

The method is FedCiR (https://arxiv.org/abs/2308.15786); its baselines, datasets and experiments are here too.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Algorithm": "fedcir.algorithm",
    "Config": "fedcir.config",
    "FedAlign": "fedcir.algorithms.fedalign",
    "FedAvg": "fedcir.algorithms.fedavg",
    "FedCiR": "fedcir.algorithms.fedcir",
    "FedReg": "fedcir.algorithms.fedreg",
    "InputError": "fedcir.types",
    "Losses": "fedcir.types",
    "Result": "fedcir.training",
    "RoundRecord": "fedcir.types",
    "RunFolder": "fedcir.records",
    "train": "fedcir.training",
}

__all__ = [  # noqa: PLE0604 (names, all of them)
    *_EXPORTS,
    "__version__",
]

if TYPE_CHECKING:
    from fedcir.algorithm import Algorithm as Algorithm
    from fedcir.algorithms.fedalign import FedAlign as FedAlign
    from fedcir.algorithms.fedavg import FedAvg as FedAvg
    from fedcir.algorithms.fedcir import FedCiR as FedCiR
    from fedcir.algorithms.fedreg import FedReg as FedReg
    from fedcir.config import Config as Config
    from fedcir.records import RunFolder as RunFolder
    from fedcir.training import Result as Result
    from fedcir.training import train as train
    from fedcir.types import InputError as InputError
    from fedcir.types import Losses as Losses
    from fedcir.types import RoundRecord as RoundRecord


def __getattr__(name: str) -> Any:
    """Import on first use, so that `fedcir --help` does not wait for torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fedcir' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
