"""A run of the version before the redesign (commit 91e5e3d) is read, and resumed to the model of a run of this one."""

import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn

import fedcir

FOLDER = Path(__file__).with_name("earlier_run.tar.gz")
"""Two rounds of SCAFFOLD by `train` below. Its clients and its server have a state between rounds."""


def train(out: Path, rounds: int, resume: bool = False) -> fedcir.Result:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    inputs = torch.linspace(-1, 1, 96).reshape(24, 4).sin()
    sites = {}
    for number in range(3):
        samples = [(inputs[row], row % 2) for row in range(number, 24, 3)]
        sites[f"site {number}"] = (samples[:6], samples[6:])
    options = {"local_steps": 2, "batch_size": 4, "workers": 1, "device": "cpu"}
    return fedcir.train(
        sites, encoder=encoder, num_classes=2, algorithm="scaffold", rounds=rounds, out=out, resume=resume, **options
    )


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with tarfile.open(FOLDER) as archive:
        archive.extractall(tmp_path / "earlier", filter="data")
    return tmp_path / "earlier"


def test_a_run_of_the_version_before_is_read(earlier: Path) -> None:
    run = fedcir.load_run(earlier)
    assert run.finished
    assert [record.round for record in run.records] == [1, 2]
    assert run.hits is not None


def test_a_run_of_the_version_before_is_resumed_to_the_same_model(earlier: Path, tmp_path: Path) -> None:
    resumed, whole = train(earlier, 4, resume=True), train(tmp_path / "whole", 4)
    assert [record.round for record in resumed.records] == [1, 2, 3, 4]
    for name, tensor in whole.network.state_dict().items():  # equal to the bit on the processor that wrote the folder
        torch.testing.assert_close(resumed.network.state_dict()[name], tensor)
