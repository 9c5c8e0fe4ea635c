"""Algorithms on Flower: between machines, and in users' own apps. Only this package imports flwr."""

import importlib
from typing import TYPE_CHECKING, Any

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("fedcir.flower needs Flower: pip install 'fedcir[flower]'") from error

if TYPE_CHECKING:
    from fedcir.flower.site_requests import local_update as local_update
    from fedcir.flower.strategy import AlgorithmStrategy as AlgorithmStrategy

__all__ = ["AlgorithmStrategy", "local_update"]

_EXPORTS = {"AlgorithmStrategy": "fedcir.flower.strategy", "local_update": "fedcir.flower.site_requests"}


def __getattr__(name: str) -> Any:
    """Import on first use: Flower imports this package for every message, and torch takes longer than the rest."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fedcir.flower' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
