"""Which round's model a run saves."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedcir.config import Config, ConfigRequest
from fedcir.errors import InputError
from fedcir.reporting.evaluation_report import evaluate
from fedcir.runs.reader import load_run
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run

Tiny = Callable[..., Config]
Train = Callable[..., Path]
BEST = ("server.keep=best", "data.val_fraction=0.25", "server.rounds=5", "local.lr=0.3", "run.workers=1")
"""Steps that are too long, so that accuracy goes up and down; checkpoints come every five rounds."""


def best_round(run: Path) -> int:
    """By three lines of arithmetic on the records: the first of the highest mean accuracy on validation images."""
    rounds = [json.loads(line)["validation"] for line in (run / "rounds.jsonl").read_text().splitlines()]
    means = [sum(accuracy.values()) / len(accuracy) for accuracy in rounds]
    return means.index(max(means)) + 1


@pytest.fixture(scope="module")
def best(tiny: Tiny, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny("fedavg", *BEST), tmp_path_factory.mktemp("runs") / "best")


def test_with_keep_best_the_model_is_that_of_a_run_that_ends_after_the_best_round(
    tiny: Tiny, train: Train, best: Path, tmp_path: Path
) -> None:
    number = best_round(best)
    assert number < 5  # which is the only round that has a checkpoint in any case
    short = train(tiny("fedavg", *BEST, "server.keep=last", f"server.rounds={number}"), tmp_path / "short")
    one, two = RunFolder(best).weights(), RunFolder(short).weights()
    assert all(torch.equal(one[name], two[name]) for name in one)
    saved = {"round": number, "keep": "best"}
    assert RunFolder(best).summary()["saved"] == saved
    assert RunFolder(best).card()["saved"] == saved
    assert RunFolder(short).summary()["saved"] == {"round": number, "keep": "last"}
    result, expected = RunFolder(best).calibration(), RunFolder(short).calibration()
    assert result == expected
    assert result is not None


@pytest.mark.parametrize("until", [1, 3, 4])
def test_a_stopped_and_a_longer_run_save_the_same_files_as_one_in_one_go(
    tiny: Tiny, train: Train, best: Path, tmp_path: Path, until: int
) -> None:
    out = train(tiny("fedavg", *BEST, "server.rounds=4"), tmp_path / "run", until=until)
    train(tiny("fedavg", *BEST, "server.rounds=4"), out, resume=True)
    train(tiny("fedavg", *BEST), out, resume=True)
    for name in ("model.safetensors", "calibration.json"):
        assert (out / name).read_bytes() == (best / name).read_bytes()
    assert RunFolder(out).summary()["saved"] == RunFolder(best).summary()["saved"]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedproto"])
def test_evaluate_gives_the_accuracies_of_the_round_that_was_saved(
    tiny: Tiny, train: Train, best: Path, tmp_path: Path, method: str
) -> None:
    out = best if method == "fedavg" else train(tiny(method, *BEST), tmp_path / "run")
    run = load_run(out)
    assert run.saved_round == best_round(out)
    assert run.summary is not None
    result = evaluate(run, device="cpu")
    assert {item.domain: item.accuracy for item in result} == run.summary["best"]["accuracy"]
    assert run.saved_scores == run.summary["best"]
    assert result.temperature is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("data.val_fraction=0",), "data.val_fraction is 0: set data.val_fraction=0.1"),
        (("privacy.clip=1.0", "privacy.noise=1.0", "model.norm=group"), "scores, which have no noise"),
    ],
)
def test_without_validation_images_or_with_noise_no_round_can_be_picked(
    tiny: Tiny, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message), open_run(tiny("fedavg", *BEST, *more)):
        pass


def test_a_run_that_keeps_the_last_does_not_become_one_that_keeps_the_best(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    out = train(tiny("fedavg", *BEST, "server.keep=last", "server.rounds=1"), tmp_path / "run")
    with pytest.raises(InputError, match=r"started with server.keep=last, not best"):
        train(tiny("fedavg", *BEST), out, resume=True)


def test_the_option_is_the_setting() -> None:
    assert ConfigRequest(options={"keep": "best"}).tables() == {"server": {"keep": "best"}}
