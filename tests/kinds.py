"""Algorithms by kind, for tests that need not go over all of them: tests/test_conformance.py does."""

from collections.abc import Sequence

import pytest

from fedcir.algorithms import list_algorithms

KINDS = ["fedavg", "fedcir", "fedproc", "fedsr", "scaffold", "fedbn", "fedproto", "centralized"]
"""State between rounds: none; server optimiser; prototypes; client network, groups, layers, whole model; none."""


def mark_others_slow(names: Sequence[str] | None = None, fast: Sequence[str] = KINDS) -> list[object]:
    """Parameters for a test over all algorithms: those in `fast`, one of each kind, are fast; the others are slow."""
    names = list_algorithms() if names is None else names
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
