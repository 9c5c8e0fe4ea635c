"""One bit for each test image, kept of the last round."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir.algorithms import make_algorithm
from fedcir.client.client_requests import evaluate_client
from fedcir.client.prediction import DomainHits, Hits
from fedcir.config import AlgorithmConfig, Config
from fedcir.data.torch_datasets import federation_from_datasets
from fedcir.errors import InputError
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.session import open_session


def dataset(seed: int, samples: int) -> TensorDataset:
    """Noise with labels of three classes."""
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 6, generator=draw), torch.arange(samples) % 3)


CLIENTS = {"a": (dataset(0, 30), dataset(1, 21)), "b": (dataset(2, 30), dataset(3, 10))}


def trained(out: Path, **more: Any) -> Path:
    options = {"rounds": 2, "local_steps": 2, "batch_size": 8, "algorithm": "fedavg", "workers": 1, **more}
    fedcir.train(CLIENTS, encoder=nn.Linear(6, 4), num_classes=3, out=out, **options)
    return out


def test_the_bits_of_a_run_are_its_last_test_image_by_image(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = fedcir.load_run(trained(tmp_path / "run"))
    assert run.hits is not None
    assert {name: len(result.correct) for name, result in run.hits.domains.items()} == {"a": 21, "b": 10}
    assert {name: result.correct.mean() for name, result in run.hits.domains.items()} == pytest.approx(
        run.final["accuracy"]
    )
    assert [run.hits.domains[name].labels for name in "ab"] == [(7, 7, 7), (4, 3, 3)]
    test = CLIENTS["a"][1]
    with torch.inference_mode():
        predicted = run.model(encoder=nn.Linear(6, 4))(test.tensors[0]).argmax(-1)
    np.testing.assert_array_equal(run.hits.domains["a"].correct, (predicted == test.tensors[1]).numpy())


def test_worker_processes_give_the_same_bits(tmp_path: Path) -> None:
    files = []
    for workers in (1, 2):
        torch.manual_seed(0)
        files.append((trained(tmp_path / f"{workers}", workers=workers) / "hits.json").read_bytes())
    assert files[0] == files[1]


def test_a_private_run_keeps_no_bits(tmp_path: Path) -> None:
    private = {"privacy.clip": 0.5, "privacy.noise": 1.0}
    assert not (trained(tmp_path / "run", set=private) / "hits.json").exists()


@pytest.mark.parametrize("deployed", [False, True])
def test_the_bits_of_a_site_do_not_travel(deployed: bool) -> None:
    federation = federation_from_datasets(CLIENTS, nn.Linear(6, 4), 3, None, 0)
    session = open_session(Config(), make_algorithm(AlgorithmConfig("fedavg")), federation)
    trainer = session.make_trainer()
    trainer.deployed = deployed
    reply = evaluate_client(trainer, federation.clients[0], session.state.shared, {}, trainer.total_rounds)
    assert bool(reply.tensors) is not deployed
    first = evaluate_client(trainer, federation.clients[0], session.state.shared, {}, 1)
    assert first.tensors == {}  # not the last round


def test_bits_of_an_earlier_round_are_not_those_of_an_extended_run(tmp_path: Path) -> None:
    folder = RunFolder(trained(tmp_path / "run"))
    folder.save_json("hits.json", Hits(1, {"a": DomainHits(np.ones(3, bool), (1, 1, 1))}).to_json())
    assert folder.hits() is None


@pytest.mark.parametrize("change", [{"images": 20}, {"hits": "zz"}, {"labels": [30, -9]}])
def test_damaged_bits_are_named(tmp_path: Path, change: dict[str, Any]) -> None:
    path = trained(tmp_path / "run") / "hits.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, "round": 3}), encoding="utf-8")
    with pytest.raises(InputError, match=r"hits\.json"):
        RunFolder(path.parent).hits()
    del values["checksum"]
    values["domains"]["a"] |= change
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(InputError, match=r"hits\.json.*delete it"):
        RunFolder(path.parent).hits()
