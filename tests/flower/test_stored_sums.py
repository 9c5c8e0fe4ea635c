"""Stored sums and one more message across sites: the worth of federating and a withdrawal, without an image."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crossing import NODES, across, altered, dropped, instead, model, shares
from flwr.app import Message, MessageType, RecordDict
from grid import MemoryGrid, run_of_flower, site  # noqa: F401

import fedcir
from fedcir.config import Config
from fedcir.errors import InputError
from fedcir.flower.strategy import AlgorithmStrategy
from fedcir.flower.wire import TaskHeader, pack_task
from fedcir.runs.reader import load_run

Tiny = Callable[..., Config]
ONE = ("model.freeze=true", "data.val_fraction=0.2", "algorithm.standardise=domain")
STORED = "server.store_sums=true"


def test_the_worth_of_a_run_across_sites_is_that_of_the_run_in_process(
    tiny: Tiny, train: Callable[..., Path], tmp_path: Path
) -> None:
    one = train(tiny("fedcirone", *ONE, "run.workers=1"), tmp_path / "one" / "run")
    grid, out = shares(tmp_path), tmp_path / "two" / "run"
    across(grid, tiny("fedcirone", *ONE, STORED, "run.workers=1"), out)
    assert dropped(out) == [{}]
    assert model(out) == model(one)
    assert fedcir.worth(out).to_json() == fedcir.worth(one).to_json()
    assert len(grid.asked(MessageType.EVALUATE)) == len(NODES), "the heads came with the message that tests the model"


def test_a_site_is_forgotten_without_its_images_or_those_of_others(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("fedcirone", *ONE, STORED)
    across(shares(tmp_path), config, tmp_path / "run")
    withdrawal = fedcir.forget(tmp_path / "run", "ink", out=tmp_path / "out")
    others = {
        node: site(partition_id=number, state=str(tmp_path / "others" / str(number)), device="cpu")
        for number, node in enumerate(NODES)
        if number
    }
    across(MemoryGrid(others), config, tmp_path / "never", sites=2)
    assert model(withdrawal.path) == model(tmp_path / "never") != model(tmp_path / "run")
    assert withdrawal.record["images"] == load_run(tmp_path / "run").manifest["clients"][0]["train"]


def test_without_stored_sums_the_images_are_needed(tiny: Tiny, tmp_path: Path) -> None:
    across(shares(tmp_path), tiny("fedcirone", *ONE), tmp_path / "run")
    with pytest.raises(InputError, match=r"run it with --set server\.store_sums=true, or give data_root"):
        fedcir.worth(tmp_path / "run")
    with pytest.raises(InputError, match=r"runs with server\.store_sums=true can forget a site"):
        fedcir.forget(tmp_path / "run", "ink", out=tmp_path / "out")


def test_bits_of_another_number_of_heads_are_dropped(tiny: Tiny, tmp_path: Path) -> None:
    def cut(content: RecordDict) -> None:
        record = content.config_records["config"]
        record["coalitions/bits"] = record["coalitions/bits"][:-1]  # type: ignore[index]

    grid = shares(tmp_path)
    grid.nodes[NODES[1]] = altered(grid.nodes[NODES[1]], MessageType.EVALUATE, cut)
    across(grid, tiny("fedcirone", *ONE, STORED), tmp_path / "run")
    assert "evaluation" in dropped(tmp_path / "run")[0]["1"]
    with pytest.raises(InputError, match="pen did not test the heads"):
        fedcir.worth(tmp_path / "run")


def test_a_site_that_is_lost_in_training_has_no_sums(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    grid.nodes[NODES[2]] = instead(grid.nodes[NODES[2]], MessageType.TRAIN, lambda message: None)
    across(grid, tiny("fedcirone", *ONE, STORED), tmp_path / "run")
    assert [row.site for row in fedcir.worth(tmp_path / "run").sites] == ["ink", "pen"]


def test_a_run_that_lost_all_sites_but_one_has_a_model_and_no_coalitions(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    for node in NODES[1:]:
        grid.nodes[node] = instead(grid.nodes[node], MessageType.TRAIN, lambda message: None)
    across(grid, tiny("fedcirone", *ONE, STORED), tmp_path / "run")
    assert load_run(tmp_path / "run").finished
    with pytest.raises(InputError, match="give data_root"):
        fedcir.worth(tmp_path / "run")


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("fedavg", (), "stores the sums that only fedcirone sends"),
        ("fedcirone", ("server.masked=true", "algorithm.standardise=federation"), "which server.masked hides"),
        ("fedcirone", ("partition.exclude=pen,ink",), "worth compares sites, and this run has one client"),
    ],
)
def test_runs_without_sums_of_single_sites_are_refused(
    tiny: Tiny, train: Callable[..., Path], tmp_path: Path, method: str, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train(tiny(method, "model.freeze=true", STORED, *settings), tmp_path / "run")


@pytest.mark.parametrize("setting", ["server.masked", "privacy.noise"])
def test_a_site_sends_no_bit_of_an_image_where_sums_are_hidden(tiny: Tiny, tmp_path: Path, setting: str) -> None:
    values = {"server.masked": ("true",), "privacy.noise": ("1", "privacy.clip=1", "privacy.unit=example")}[setting]
    config = tiny("fedcirone", *ONE, STORED, f"{setting}={values[0]}", *values[1:])
    header = TaskHeader(config, {1: 0}, 1, key="ab")
    content = pack_task({"model": {}, "coalitions": {"weight": torch.zeros(1)}}, ["model"], header)
    reply = shares(tmp_path).nodes[NODES[0]](Message(content, 1, MessageType.EVALUATE))
    assert reply is not None
    assert f"stores the exact sums of single sites, which {setting} hides" in reply.error.reason


def test_flowers_own_loop_stores_no_sums() -> None:
    with pytest.raises(InputError, match="needs the run folder of the ServerApp"):
        AlgorithmStrategy(
            "fedcirone",
            encoder=torch.nn.Flatten(),
            example=torch.zeros(1, 1, 2, 2),
            num_classes=2,
            set={"server.store_sums": True},
        )
