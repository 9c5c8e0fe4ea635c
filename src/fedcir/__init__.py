"""Train one classifier across sites whose data look different, without moving the data.

The method is FedCiR (https://arxiv.org/abs/2308.15786); its baselines, datasets and experiments are here too.
"""

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _methods() -> dict[str, str]:
    """The class that each file in algorithms/ defines, read from its text: importing it would import torch."""
    files = sorted(Path(__file__).with_name("algorithms").glob("[!_]*.py"))
    return {
        name: f"fedcir.algorithms.{file.stem}"
        for file in files
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }


_EXPORTS = {
    **_methods(),
    "Algorithm": "fedcir.algorithms.algorithm",
    "Config": "fedcir.config",
    "FedcirError": "fedcir.types",
    "InputError": "fedcir.types",
    "Losses": "fedcir.types",
    "Prediction": "fedcir.use.predictor",
    "Predictor": "fedcir.use.predictor",
    "Result": "fedcir.engine.train",
    "RoundRecord": "fedcir.types",
    "Run": "fedcir.runs.run",
    "RunError": "fedcir.types",
    "RunFolder": "fedcir.engine.folder",
    "audit": "fedcir.insight.audit",
    "compare": "fedcir.insight.comparison",
    "diagnose": "fedcir.insight.diagnose",
    "evaluate": "fedcir.insight.evaluation",
    "export": "fedcir.use.export",
    "init": "fedcir.insight.starter",
    "load_run": "fedcir.runs.run",
    "recommend": "fedcir.insight.recommend",
    "report": "fedcir.insight.report.write",
    "reproduce": "fedcir.insight.reproduction",
    "train": "fedcir.engine.train",
    "tune": "fedcir.insight.tune",
}

__all__ = [  # noqa: PLE0604 (names, all of them)
    *_EXPORTS,
    "__version__",
]

if TYPE_CHECKING:  # for editors and type checkers; a method that is not here is exported all the same
    from fedcir.algorithms.algorithm import Algorithm as Algorithm
    from fedcir.algorithms.centralized import Centralized as Centralized
    from fedcir.algorithms.centralizedbatch import CentralizedBatch as CentralizedBatch
    from fedcir.algorithms.fedadam import FedAdam as FedAdam
    from fedcir.algorithms.fedalign import FedAlign as FedAlign
    from fedcir.algorithms.fedavg import FedAvg as FedAvg
    from fedcir.algorithms.fedavgm import FedAvgM as FedAvgM
    from fedcir.algorithms.fedbn import FedBN as FedBN
    from fedcir.algorithms.fedcir import FedCiR as FedCiR
    from fedcir.algorithms.fedcirplus import FedCiRPlus as FedCiRPlus
    from fedcir.algorithms.feddyn import FedDyn as FedDyn
    from fedcir.algorithms.fedfa import FedFA as FedFA
    from fedcir.algorithms.fedgen import FedGen as FedGen
    from fedcir.algorithms.fedlc import FedLC as FedLC
    from fedcir.algorithms.fedproc import FedProc as FedProc
    from fedcir.algorithms.fedproto import FedProto as FedProto
    from fedcir.algorithms.fedprox import FedProx as FedProx
    from fedcir.algorithms.fedreg import FedReg as FedReg
    from fedcir.algorithms.fedsr import FedSR as FedSR
    from fedcir.algorithms.fpl import FPL as FPL
    from fedcir.algorithms.moon import Moon as Moon
    from fedcir.algorithms.scaffold import Scaffold as Scaffold
    from fedcir.config import Config as Config
    from fedcir.engine.folder import RunFolder as RunFolder
    from fedcir.engine.train import Result as Result
    from fedcir.engine.train import train as train
    from fedcir.insight.audit import audit as audit
    from fedcir.insight.comparison import compare as compare
    from fedcir.insight.diagnose import diagnose as diagnose
    from fedcir.insight.evaluation import evaluate as evaluate
    from fedcir.insight.recommend import recommend as recommend
    from fedcir.insight.report.write import report as report
    from fedcir.insight.reproduction import reproduce as reproduce
    from fedcir.insight.starter import init as init
    from fedcir.insight.tune import tune as tune
    from fedcir.runs.run import Run as Run
    from fedcir.runs.run import load_run as load_run
    from fedcir.types import FedcirError as FedcirError
    from fedcir.types import InputError as InputError
    from fedcir.types import Losses as Losses
    from fedcir.types import RoundRecord as RoundRecord
    from fedcir.types import RunError as RunError
    from fedcir.use.export import export as export
    from fedcir.use.predictor import Prediction as Prediction
    from fedcir.use.predictor import Predictor as Predictor


def __getattr__(name: str) -> Any:
    """Import on first use, so that `fedcir --help` does not wait for torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fedcir' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
