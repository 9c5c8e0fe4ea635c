"""Going back: damaged generations, and a round that poisoned the model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedcir.client.state import ClientStore
from fedcir.config import Config
from fedcir.errors import InputError, RunError
from fedcir.models.tensors import clone
from fedcir.runtime.file_formats import find_best
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run
from fedcir.types import RoundRecord

Tiny = Callable[..., Config]
Train = Callable[..., Path]
SIX = ("server.rounds=6", "server.checkpoint_every=2", "local.steps=1", "run.workers=1")


@pytest.fixture(scope="module")
def whole(tiny: Tiny, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of an algorithm whose clients keep something."""
    return train(tiny("fedbn", *SIX), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it as a kill before its end would leave it."""
    copy = shutil.copytree(whole, tmp_path / "run")
    (copy / "summary.json").unlink()
    return copy


def model(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])


def notes(config: Config, out: Path, **how: Any) -> tuple[tuple[str, ...], int]:
    """What a resume says, and the round that it goes on from; it is carried to the end."""
    with open_run(config, out, True, **how) as (session, rounds):
        start = session.state.round
        list(rounds)
    return session.notes, start


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tiny: Tiny, run: Path, whole: Path) -> None:
    flip(run / "checkpoint" / "round-000006.safetensors")
    message, start = notes(tiny("fedbn", *SIX), run)
    assert start == 4
    assert len(message) == 1
    assert message[0].startswith(f"cannot read {run}/checkpoint/round-000006.safetensors: its checksum is ")
    assert message[0].endswith("; continuing from round 4")
    assert model(run) == model(whole)


def test_what_a_client_kept_and_a_disk_damaged_is_named_and_the_round_before_it_taken(
    tiny: Tiny, run: Path, whole: Path
) -> None:
    flip(run / "clients" / "1" / "round-000006.safetensors")
    message, start = notes(tiny("fedbn", *SIX), run)
    assert start == 4
    assert message[0].startswith(f"cannot read {run}/clients/1/round-000006.safetensors: its checksum is ")
    assert model(run) == model(whole)


def test_what_a_client_kept_and_a_disk_lost_is_named_and_the_round_before_it_taken(
    tiny: Tiny, run: Path, whole: Path
) -> None:
    (run / "clients" / "1" / "round-000006.safetensors").unlink()
    message, start = notes(tiny("fedbn", *SIX), run)
    assert start == 4
    assert message == (f"{run}/clients/1/round-000006.safetensors is missing; continuing from round 4",)
    assert model(run) == model(whole)


def test_a_damaged_model_of_a_finished_run_is_written_again(tiny: Tiny, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    flip(run / "model.safetensors")
    message, _ = notes(tiny("fedbn", *SIX), run)
    assert message == (
        f"{run}/model.safetensors was missing or damaged, and was written again from the last checkpoint",
    )
    assert model(run) == model(whole)


def record(round: int, accuracy: float | None, validation: float | None = None) -> RoundRecord:
    aside = None if validation is None else {"a": validation}
    return RoundRecord(round, {}, None, accuracy, None, None, 0, 0, 0, {}, {}, aside)


def test_the_best_round_is_the_first_of_the_highest_accuracy_and_validation_decides_where_there_is_any() -> None:
    tested = [record(1, 0.5), record(2, 0.75), record(3, 0.75), record(4, None)]
    assert find_best(tested) == tested[1]
    aside = [record(1, 0.5, 0.9), record(2, 0.75, 0.6)]
    assert find_best(aside) == aside[0]
    assert find_best([record(4, None)]) is None


def test_the_last_two_checkpoints_and_that_of_the_best_round_are_kept(whole: Path, tmp_path: Path) -> None:
    folder, scores = RunFolder(tmp_path), {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.5, 5: 0.95}
    state, done = RunFolder(whole).load_checkpoint(), []
    assert state is not None
    (tmp_path / "checkpoint").mkdir()
    kept = []
    for round, score in scores.items():
        folder.save_checkpoint(replace(state, round=round), done)
        done.append(record(round, score))
        kept.append(folder.checkpoint_rounds())
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    folder.save_checkpoint(replace(state, round=6), done)
    folder.save_checkpoint(replace(state, round=7), [*done, record(6, 0.1)])
    assert folder.checkpoint_rounds() == [5, 6, 7]  # round 2 was the best only until round 5


def test_what_clients_kept_stays_as_long_as_a_checkpoint_may_need_it(tmp_path: Path, whole: Path) -> None:
    store = ClientStore(tmp_path, 2, saved=lambda: [3])
    kept = ClientStore(whole / "clients").load(0, 7)
    for round in (1, 2, 5, 6, 7, 8, 9):
        store.save(0, round, kept)
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == [
        f"round-{round:06d}.safetensors" for round in (2, 7, 8, 9)
    ]


def test_from_round_goes_back_to_the_newest_checkpoint_before_it_and_keeps_the_later_lines_aside(
    tiny: Tiny, whole: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    assert notes(tiny("fedbn", *SIX), out, from_round=5) == ((), 4)
    assert (out / "rounds-6.old.jsonl").read_bytes() == (whole / "rounds.jsonl").read_bytes()
    assert model(out) == model(whole)
    assert notes(tiny("fedbn", *SIX), out, from_round=0) == ((), 0)  # what clients had kept is forgotten too
    assert (out / "rounds-6-2.old.jsonl").exists()
    assert model(out) == model(whole)


def test_from_round_without_such_a_checkpoint_says_which_there_are(tiny: Tiny, run: Path) -> None:
    rounds = RunFolder(run).checkpoint_rounds()
    lines = (run / "rounds.jsonl").read_bytes()
    with (
        pytest.raises(InputError, match=f"no checkpoint at or before round 1, but of {rounds[0]} and"),
        open_run(tiny("fedbn", *SIX), run, True, from_round=1),
    ):
        pass
    assert (run / "rounds.jsonl").read_bytes() == lines


@pytest.mark.parametrize("resume", [True, False])
def test_from_round_is_for_a_run_that_is_there(tiny: Tiny, tmp_path: Path, resume: bool) -> None:
    with (
        pytest.raises(InputError, match="is not resumed, so it cannot go back to round 3"),
        open_run(tiny("fedavg"), tmp_path / "run", resume, from_round=3),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_run_whose_model_was_poisoned_ends_well_once_it_goes_back_before_that(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    """Weights of 1e30 passed in round 5, so that no honest client can train from there."""
    config = tiny("fedavg", *SIX, "local.steps=2")
    healthy, out = train(config, tmp_path / "healthy"), train(config, tmp_path / "run", until=5)
    state = RunFolder(out).load_checkpoint()
    assert state is not None
    spoilt = clone(state.shared)
    spoilt["model"]["head.weight"].fill_(1e30)
    RunFolder(out).save_checkpoint(replace(state, shared=spoilt))
    with pytest.raises(RunError, match="round 6"):
        train(config, out, resume=True)
    assert notes(config, out, from_round=4) == ((), 4)
    assert model(out) == model(healthy)
    aside = (out / "rounds-5.old.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in aside] == [1, 2, 3, 4, 5]
