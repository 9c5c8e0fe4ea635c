"""The recommendation rests on validation images, and says what it rests on."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.config import Config, config_from_tables
from fedcir.config.toml import read_toml
from fedcir.data.domains import Domains
from fedcir.data.federation import Federation, build_federation, partition_dataset
from fedcir.errors import InputError
from fedcir.experiments.recommendation import CANDIDATES, ON_FROZEN, Recommendation, compare_candidates, recommend
from fedcir.runs.statistics import RunScores

TINY: dict[str, Any] = {"dataset": "arrays", "pilot_rounds": 1, "seeds": (0, 1), "workers": 1}
SET = {"data.val_fraction": 0.4, "model.width": 2, "local.steps": 2, "local.batch_size": 8}


def found(root: Path, **more: Any) -> Recommendation:
    return recommend(data_root=root, **{**TINY, "set": SET, **more})


@pytest.fixture(scope="module")
def tried(data_root: Path) -> Recommendation:
    return found(data_root)


def test_other_test_images_change_nothing(data_root: Path, tried: Recommendation, tmp_path: Path) -> None:
    for path in data_root.iterdir():
        arrays = dict(np.load(path))
        rng = np.random.default_rng(7)
        arrays["x_test"] = rng.integers(0, 256, arrays["x_test"].shape).astype(np.uint8)
        np.savez(tmp_path / path.name, **arrays)
    assert found(tmp_path).to_rows() == tried.to_rows()
    assert found(tmp_path).findings == tried.findings


def test_no_pilot_of_any_seed_looks_at_test_images_of_the_run_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the seed draws the test images, all pilots leave out those of seed 0, which the file is run with."""
    rng = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "ab"[number % 2] / "xy"[number // 2 % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    looked_at: list[set[str]] = []

    def record(config: Config, domains: Domains, shares: Any) -> Federation:
        looked_at.append({name for domain in domains for part in (domain.train, domain.test) for name in part.ids})
        return build_federation(config, domains, shares)

    monkeypatch.setattr("fedcir.experiments.recommendation.build_federation", record)
    found(tmp_path, dataset="folders", image_size=8)
    own = partition_dataset(config_from_tables({"data": {"name": "folders", "root": str(tmp_path), "image_size": 8}}))[
        0
    ]
    tested = {name for domain in own for name in domain.test.ids}
    assert len(tested) == 4
    assert [len(names) for names in looked_at] == [20] * len(looked_at)
    assert not any(names & tested for names in looked_at)


def test_a_gain_beyond_chance_is_chosen_and_the_simplest_otherwise() -> None:
    def trials(*gains: float) -> list[bool]:
        images = {"ink": 100_000, "wax": 100_000}
        base = RunScores({"ink": 0.5, "wax": 0.7}, images)
        by_seed = [RunScores({"ink": 0.5 + gain, "wax": 0.7 + gain}, images) for gain in gains]
        others = {candidate.name: [base] * len(gains) for candidate in CANDIDATES}
        return [trial.better for trial in compare_candidates(CANDIDATES, {**others, CANDIDATES[2].name: by_seed})]

    assert trials(0.04, 0.05, 0.06) == [False, False, True, False]  # 0.05 +- 0.025
    assert trials(0.0, 0.05, 0.1) == [False, False, False, False]  # 0.05 +- 0.124
    assert trials(0.05, 0.05) == [False, False, False, False]  # two seeds are no verdict


def test_the_written_file_is_what_run_takes(data_root: Path, tried: Recommendation, tmp_path: Path) -> None:
    tried.save(tmp_path / "fedcir.toml")
    config = config_from_tables(read_toml(tmp_path / "fedcir.toml"))
    assert config.algorithm.name == tried.choice.candidate.algorithm
    assert config.data.root == str(data_root)
    assert config.model.width == 2
    with pytest.raises(InputError, match=r"fedcir\.toml exists: name a new file"):
        tried.save(tmp_path / "fedcir.toml")


def test_rows_hold_every_candidate_and_one_choice(tried: Recommendation) -> None:
    rows = tried.to_rows()
    assert [row["candidate"] for row in rows] == [candidate.name for candidate in CANDIDATES]
    assert sum(row["chosen"] for row in rows) == 1
    assert tried.reason.startswith("No recommendation: 2 seeds cannot tell a gain from chance, try `--seeds 0,1,2`.")
    assert replace(tried, seeds=(0, 1, 2)).reason.startswith(f"Use {tried.choice.candidate.name}: ")


def test_a_held_out_domain_is_not_looked_at(data_root: Path, tmp_path: Path) -> None:
    shutil.copytree(data_root, tmp_path, dirs_exist_ok=True)
    diagnosis = found(tmp_path, hold_out="wax").diagnosis
    assert diagnosis is not None
    assert diagnosis.domains == ["ink", "pen"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": (0,)}, "at least two seeds"),
        ({"pilot_rounds": 0}, "pilot_rounds must be at least 1, got 0"),
        ({"norm": "batch"}, "no option 'norm'"),
        ({"set": {**SET, "model.norm": "group"}}, "model.norm=group leaves one: leave model.norm out"),
        ({"set": {**SET, "server.aggregation": "krum", "server.byzantine": 2}}, "krum needs 7 active clients"),
    ],
)
def test_what_cannot_be_is_refused(data_root: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        found(data_root, **given)


def test_candidates_that_settings_refuse_are_left_out(data_root: Path) -> None:
    notes: list[str] = []
    tried = found(data_root, set={**SET, "privacy.clip": 1.0}, on_note=notes.append)
    assert [trial.candidate.name for trial in tried.trials] == ["fedavg, invariant", "fedcirplus"]
    assert [note.partition(": privacy.clip cannot")[0] for note in notes] == ["left out: fedavg", "left out: fedcir"]
    only = replace(tried, trials=tried.trials[:1])
    assert only.reason == "Use fedavg, invariant: it is the only candidate that goes with these settings."


def test_on_a_frozen_encoder_rounds_have_to_beat_one_message(data_root: Path) -> None:
    done: list[tuple[int, int]] = []
    frozen = {**SET, "model.freeze": True}
    rows = found(
        data_root, set=frozen, pilot_rounds=2, on_work=lambda count, total, what: done.append((count, total))
    ).to_rows()
    assert [row["candidate"] for row in rows] == [candidate.name for candidate in ON_FROZEN]
    assert (rows[0]["candidate"], rows[0]["difference"]) == ("fedcirone", None)
    assert done[-1] == (14, 14)  # of two seeds: one round, and three methods with two


def test_the_command_prints_the_evidence_and_what_to_do_next(
    data_root: Path, tmp_path: Path, fedcir: Callable[..., Any]
) -> None:
    out = tmp_path / "fedcir.toml"
    sets = [part for name, value in SET.items() for part in ("--set", f"{name}={value}")]
    arguments = ["--dataset", "arrays", "--data-root", str(data_root), *sets, "--seeds", "0,1", "--pilot-rounds", "1"]
    code, message, *_ = fedcir("recommend", *arguments, "--out", out, "--quiet")
    assert code == 0
    assert "accuracy on validation images (%)" in message
    assert f"{out} holds these settings. Next: `fedcir run {out}`." in message
