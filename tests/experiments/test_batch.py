"""What several runs are checked for before any of them starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedcir.algorithms import list_algorithms
from fedcir.config import Config
from fedcir.experiments.batch import prepare_jobs, required_methods
from fedcir.experiments.sweep import Job

POOLING = {"centralized", "centralizedbatch"}
FAULTY = """import fedcir

class Faulty(fedcir.FedAvg):
    def build(self, task):
        raise RuntimeError("it was never going to work")
"""
SENDING = {"fedgen", "fedproc", "fpl", "fedproto", "fedfa", "scaffold"}


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ([], set()),
        (
            ["privacy.clip=1", "model.norm=group"],
            POOLING | SENDING | {"fedbn", "fedcirone", "fednova"},
        ),  # which needs BatchNorm
        (["attack.kind=scale"], POOLING),
        (["server.aggregation=median"], {"fedproto", "fedcirone"}),
        (["server.upload=int8"], {"fedproto", "fedcirone"}),
        (["partition.hold_out=wax"], {"fedproto", "fedbn", "fedrep"}),
        (["model.batchnorm=local"], set()),
        (["local.epochs=1"], POOLING | {"fedcirone"}),
    ],
)
def test_methods_that_settings_refuse_are_left_out_unless_they_are_named(
    tiny: Callable[..., Config], tmp_path: Path, settings: list[str], refused: set[str]
) -> None:
    jobs = [Job(tiny(name, *settings), tmp_path / name) for name in list_algorithms()]
    notes: list[str] = []
    _, left_out = prepare_jobs(jobs, False, None, required_methods(["all"]), on_note=notes.append)
    assert set(left_out) == refused
    assert notes == [f"left out: {why}" for why in left_out.values()]
    assert all(name in why and "\n" not in why for name, why in left_out.items())


def test_a_fault_in_ones_own_method_is_left_to_its_run(tiny: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    jobs = [Job(tiny(name), tmp_path / "out") for name in ("fedavg", str(tmp_path / "faulty.py"))]
    assert not prepare_jobs(jobs, False, None, required_methods([tmp_path / "faulty.py"]))[1]
