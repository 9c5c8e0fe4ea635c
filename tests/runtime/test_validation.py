"""Images set aside from training, on which the best round is picked."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedcir.algorithms.fedavg import FedAvg
from fedcir.config import Config, DataConfig
from fedcir.data.federation import open_federation
from fedcir.data.opening import open_dataset
from fedcir.errors import InputError
from fedcir.runtime.rounds import summarise
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run
from kinds import mark_others_slow

Tiny = Callable[..., Config]
Train = Callable[..., Path]

ASIDE = "data.val_fraction=0.25"


def rounds(run: Path) -> list[dict[str, Any]]:
    """The lines of rounds.jsonl without their times."""
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


@pytest.fixture(scope="module")
def run(tiny: Tiny, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of several rounds with images set aside."""
    return train(tiny("fedavg", ASIDE, "server.rounds=8", "local.lr=0.1"), tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize(
    ("fraction", "counts"),
    [(0.25, [2, 2, 2]), (0.5, [4, 4, 4]), (0.1, [1, 1, 0]), (0.001, [1, 0, 0]), (0.999, [7, 7, 7])],
)
def test_a_share_of_every_class_is_set_aside_and_the_test_set_stays(
    data_root: Path, fraction: float, counts: list[int]
) -> None:
    """Eight training images of each of three classes; whatever the share, one of each is left."""
    whole = open_dataset(DataConfig("arrays", str(data_root)), 0)
    parted = open_dataset(DataConfig("arrays", str(data_root), val_fraction=fraction), 0)
    for before, after in zip(whole, parted, strict=True):
        assert after.validation is not None
        assert np.bincount(after.validation.labels, minlength=3).tolist() == counts
        assert np.bincount(after.train.labels).tolist() == [8 - count for count in counts]
        assert sorted([*after.train.ids, *after.validation.ids]) == sorted(before.train.ids)
        assert list(after.test.ids) == list(before.test.ids)
        rows = [list(before.train.ids).index(name) for name in after.validation.ids]
        assert np.array_equal(after.validation.labels, before.train.labels[rows])
        assert np.array_equal(after.validation.pixels(np.arange(len(rows))), before.train.pixels(rows))


def test_what_is_set_aside_depends_on_the_seed_and_the_domain(data_root: Path) -> None:
    def aside(seed: int, domain: str) -> list[str]:
        result = open_dataset(DataConfig("arrays", str(data_root), val_fraction=0.25), seed)[domain].validation
        assert result is not None
        return [name.split("/")[-1] for name in result.ids]

    assert aside(0, "ink") == aside(0, "ink")
    assert aside(0, "ink") != aside(1, "ink")
    assert aside(0, "ink") != aside(0, "pen")


def test_a_share_that_sets_no_image_aside_is_refused(tmp_path: Path) -> None:
    images = np.zeros((2, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "ink.npz", x_train=images, y_train=[0, 1], x_test=images + 1, y_test=[0, 1])
    with pytest.raises(InputError, match=r"val_fraction=0.5: no class of domain 'ink' has an image to spare"):
        open_dataset(DataConfig("arrays", str(tmp_path), val_fraction=0.5), 0)


def test_every_round_tells_the_accuracy_on_the_images_set_aside(run: Path) -> None:
    for record in rounds(run):
        assert list(record["validation"]) == ["ink", "pen", "wax"]
        for accuracy in record["validation"].values():
            assert accuracy * 6 == pytest.approx(round(accuracy * 6))  # of six images


def test_the_accuracy_is_that_of_the_model_on_these_images(tiny: Tiny, run: Path) -> None:
    federation = open_federation(tiny("fedavg", ASIDE))
    modules = FedAvg().build(federation.builder)
    modules["model"].load_state_dict(load_file(run / "model.safetensors"))
    modules["model"].eval()
    for client in federation.clients:
        assert client.validation is not None
        x, y = client.validation.batch(np.arange(6), torch.device("cpu"), torch.channels_last)
        with torch.inference_mode():
            right = (modules["model"](x).argmax(1) == y).float().mean()
        assert rounds(run)[-1]["validation"][client.domain] == pytest.approx(float(right))


def test_the_best_round_is_the_first_with_the_highest_mean_on_them(run: Path) -> None:
    means = [np.mean(list(record["validation"].values())) for record in rounds(run)]
    best = rounds(run)[int(np.argmax(means))]  # argmax gives the first
    summary = RunFolder(run).summary()["best"]
    assert summary["picked_on"] == "validation"
    assert summary["round"] == best["round"]
    assert summary["accuracy"] == best["accuracy"]  # what is told of it is its test accuracy


@pytest.mark.parametrize(
    ("validation", "best"),
    [
        ([(0.5, 0.5), (0.7, 0.8), (0.8, 0.7), (0.2, 0.2)], 2),
        ([(0.5, 0.5), (0.2, 0.9), (0.6, 0.4), (0.0, 1.0)], 2),  # the mean counts, not the worst or the best
        ([(0.5, 0.5), (0.5, 0.5), (0.5, 0.5), (0.5, 0.5)], 1),
        ([None, (0.2, 0.2), None, (0.5, 0.5)], 4),  # evaluated every second round
        ([None, None, None, (0.0, 0.0)], 4),
        (None, 3),  # nothing set aside: the first with the best test accuracy
    ],
)
def test_of_rounds_alike_the_earliest_is_the_best(
    tiny: Tiny, train: Train, tmp_path: Path, validation: list[tuple[float, float] | None] | None, best: int
) -> None:
    """Test accuracies of 0.1, 0.2, 0.9 and 0.9, against which validation decides."""
    done = RunFolder(train(tiny("fedavg", "server.rounds=1", "local.steps=1"), tmp_path / "run")).records()[0]
    with open_run(tiny("fedavg")) as (session, _):
        for number, test in enumerate((0.1, 0.2, 0.9, 0.9)):
            record = replace(done, round=number + 1, scores={"ink": test, "pen": test}, score_mean=test)
            if validation is not None:
                values = validation[number]
                aside = {} if values is None else dict(zip(("ink", "pen"), values, strict=True))
                unseen = {} if values else {"scores": None, "score_mean": None}
                record = replace(record, **unseen, validation=aside or None)
            session.records.append(record)
        message = summarise(session)["best"]
    assert message["round"] == best
    assert message["picked_on"] == ("test" if validation is None else "validation")


def test_without_images_set_aside_nothing_tells_of_them(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    plain = train(tiny("fedavg"), tmp_path / "plain")
    zero = train(tiny("fedavg", "data.val_fraction=0"), tmp_path / "zero")
    for record in rounds(plain):
        assert "validation" not in record
    assert RunFolder(plain).summary()["best"]["picked_on"] == "test"
    assert "validation" not in RunFolder(plain).manifest()
    assert rounds(plain) == rounds(zero)
    assert (plain / "model.safetensors").read_bytes() == (zero / "model.safetensors").read_bytes()


def test_the_command_says_what_the_best_round_was_picked_on(
    fedcir: Callable[..., Any], options: list[str], tmp_path: Path
) -> None:
    output = fedcir("run", *options, "--algorithm", "fedavg", "--set", ASIDE, "-o", tmp_path / "run")
    assert output.code == 0
    assert "the best round is picked on validation data" in " ".join(output.out.split())


@pytest.mark.parametrize("algorithm", ["fedavg", "centralized"])
def test_a_held_out_domain_is_tested_but_picks_nothing(
    tiny: Tiny, train: Train, tmp_path: Path, algorithm: str
) -> None:
    run = train(tiny(algorithm, ASIDE, "partition.hold_out=pen", "server.rounds=2"), tmp_path / "run")
    for record in rounds(run):
        assert list(record["validation"]) == ["ink", "wax"]
        assert list(record["accuracy"]) == ["ink", "wax", "pen"]


@pytest.mark.parametrize("scheme", ["dirichlet", "iid"])
def test_several_clients_of_a_domain_look_at_its_images_once(
    tiny: Tiny, train: Train, tmp_path: Path, scheme: str
) -> None:
    config = tiny("fedavg", ASIDE, f"partition.scheme={scheme}", "partition.clients=7", "server.rounds=1")
    assert list(rounds(train(config, tmp_path / "run"))[0]["validation"]) == ["ink", "pen", "wax"]


@pytest.mark.parametrize("algorithm", mark_others_slow(["fedcir", "fedbn", "fedproto", "centralized"], ["fedbn"]))
def test_a_run_stopped_on_its_way_ends_in_the_same_bits(
    tiny: Tiny, train: Train, tmp_path: Path, algorithm: str
) -> None:
    config = tiny(algorithm, ASIDE, "server.rounds=2", "server.checkpoint_every=1")
    whole = train(config, tmp_path / "whole")
    stopped = train(config, tmp_path / "stopped", until=1)
    train(config, stopped, resume=True)
    assert all(list(record["validation"]) == ["ink", "pen", "wax"] for record in rounds(whole))
    assert rounds(stopped) == rounds(whole)
    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert RunFolder(stopped).summary()["best"] == RunFolder(whole).summary()["best"]


def test_a_run_is_not_continued_with_another_share(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    train(tiny("fedavg", ASIDE), tmp_path / "run", until=1)
    with pytest.raises(InputError, match=r"was started with data.val_fraction=0.25, not 0.5"):
        train(tiny("fedavg", "data.val_fraction=0.5"), tmp_path / "run", resume=True)
