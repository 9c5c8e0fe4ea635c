"""Every table and figure of the paper, one file each: `fig_risk.py` is `fedcir reproduce fig-risk`."""

import importlib
import pkgutil

from fedcir.config import nearest
from fedcir.insight.experiments.experiment import Experiment
from fedcir.types import InputError

_PARTS = ("experiment", "paper", "plan", "axes")


def ids() -> list[str]:
    """The names of all experiments."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _PARTS)
    return [name.replace("_", "-") for name in names]


def experiment(id: str) -> Experiment:
    """One of them by its name."""
    if id not in ids():
        raise InputError(f"no table or figure {id!r}; {nearest(id, ids())}")
    made: Experiment = importlib.import_module(f"{__name__}.{id.replace('-', '_')}").EXPERIMENT
    return made
