"""Train one classifier across sites whose data look different, without moving the data.

The method is FedCiR (https://arxiv.org/abs/2308.15786); its baselines, datasets and experiments are here too.
"""

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # the public names, for editors, type checkers and `_list_exports`
    from fedcir.algorithms.algorithm import Algorithm as Algorithm
    from fedcir.algorithms.centralized import Centralized as Centralized
    from fedcir.algorithms.centralizedbatch import CentralizedBatch as CentralizedBatch
    from fedcir.algorithms.ditto import Ditto as Ditto
    from fedcir.algorithms.fedadam import FedAdam as FedAdam
    from fedcir.algorithms.fedalign import FedAlign as FedAlign
    from fedcir.algorithms.fedavg import FedAvg as FedAvg
    from fedcir.algorithms.fedavgm import FedAvgM as FedAvgM
    from fedcir.algorithms.fedbn import FedBN as FedBN
    from fedcir.algorithms.fedcir import FedCiR as FedCiR
    from fedcir.algorithms.fedcirone import FedCiROne as FedCiROne
    from fedcir.algorithms.fedcirplus import FedCiRPlus as FedCiRPlus
    from fedcir.algorithms.feddyn import FedDyn as FedDyn
    from fedcir.algorithms.fedfa import FedFA as FedFA
    from fedcir.algorithms.fedgen import FedGen as FedGen
    from fedcir.algorithms.fedlc import FedLC as FedLC
    from fedcir.algorithms.fednova import FedNova as FedNova
    from fedcir.algorithms.fedproc import FedProc as FedProc
    from fedcir.algorithms.fedproto import FedProto as FedProto
    from fedcir.algorithms.fedprox import FedProx as FedProx
    from fedcir.algorithms.fedreg import FedReg as FedReg
    from fedcir.algorithms.fedrep import FedRep as FedRep
    from fedcir.algorithms.fedsr import FedSR as FedSR
    from fedcir.algorithms.fpl import FPL as FPL
    from fedcir.algorithms.moon import Moon as Moon
    from fedcir.algorithms.scaffold import Scaffold as Scaffold
    from fedcir.analysis.withdrawal import Withdrawal as Withdrawal
    from fedcir.analysis.withdrawal import forget as forget
    from fedcir.config import Config as Config
    from fedcir.errors import FedcirError as FedcirError
    from fedcir.errors import InputError as InputError
    from fedcir.errors import RunError as RunError
    from fedcir.experiments.comparison import compare as compare
    from fedcir.experiments.recommendation import recommend as recommend
    from fedcir.experiments.reproduction import reproduce as reproduce
    from fedcir.experiments.starter import init as init
    from fedcir.experiments.tuning import tune as tune
    from fedcir.inference.exporting import export as export
    from fedcir.inference.predictor import Prediction as Prediction
    from fedcir.inference.predictor import Predictor as Predictor
    from fedcir.reporting.diagnosis_report import diagnose as diagnose
    from fedcir.reporting.evaluation_report import evaluate as evaluate
    from fedcir.reporting.leakage_report import audit as audit
    from fedcir.reporting.run_report import report as report
    from fedcir.reporting.worth_report import worth as worth
    from fedcir.runs.reader import Run as Run
    from fedcir.runs.reader import load_run as load_run
    from fedcir.runtime.run_folder import RunFolder as RunFolder
    from fedcir.runtime.simulation import Result as Result
    from fedcir.runtime.simulation import train as train
    from fedcir.tasks.classification import Classification as Classification
    from fedcir.tasks.multilabel import MultiLabel as MultiLabel
    from fedcir.tasks.regression import Regression as Regression
    from fedcir.tasks.segmentation import Segmentation as Segmentation
    from fedcir.tasks.survival import Survival as Survival
    from fedcir.tasks.task import Task as Task
    from fedcir.types import Aggregator as Aggregator
    from fedcir.types import Losses as Losses
    from fedcir.types import RoundRecord as RoundRecord


def _list_exports() -> dict[str, str]:
    """Module of each public name: those above, and the class of every file in algorithms/. Imports neither."""
    exports = {}
    for file in sorted(Path(__file__).with_name("algorithms").glob("[!_]*.py")):
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            exports[name] = f"fedcir.algorithms.{file.stem}"
    own = Path(__file__).read_text(encoding="utf-8")
    return exports | {name: module for module, name in re.findall(r"^    from (\S+) import \w+ as (\w+)$", own, re.M)}


_EXPORTS = _list_exports()
__all__ = [*_EXPORTS, "__version__"]  # noqa: PLE0604 (names, all of them)


def __getattr__(name: str) -> Any:
    """Import on first use, so that `fedcir --help` does not wait for torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fedcir' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
