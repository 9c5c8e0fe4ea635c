"""A resume of a private run on one machine, after a file that it reads was lost, cut or swapped."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from seven import Train, but_seconds, lines

from fedcir.config import Config
from fedcir.errors import InputError
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run

Tiny = Callable[..., Config]
Damage = Callable[[Path, Path], None]
ON = ("privacy.clip=1", "model.norm=group", "server.upload=int8", "local.steps=1", "run.workers=1", "server.rounds=4")


@pytest.fixture(scope="module")
def runs(tiny: Tiny, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, and the first as it was after round 3; clients keep rounding errors."""
    folder = tmp_path_factory.mktemp("runs")
    for name, noise in (("one", 1), ("other", 4)):
        train(config_of(tiny, noise), folder / name)
    train(config_of(tiny), folder / "stopped", until=3)
    return folder


def config_of(tiny: Tiny, noise: int = 1) -> Config:
    return tiny("fedavg", *ON, f"privacy.noise={noise}", "server.checkpoint_every=1")


def refusal(config: Config, out: Path) -> str | None:
    """Resume a run to its end; gives the reason if it is refused."""
    try:
        with open_run(config, out, resume=True) as (_, rounds):
            list(rounds)
    except InputError as error:
        return str(error)
    return None


def delete(file: Path, other: Path) -> None:
    file.unlink()


def truncate(file: Path, other: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def swap(file: Path, other: Path) -> None:
    shutil.copyfile(other, file)


@pytest.mark.parametrize("damage", [delete, truncate, swap])
@pytest.mark.parametrize(
    "name",
    [
        "config.toml",
        "manifest.json",
        "rounds.jsonl",
        "checkpoint/round-000003.safetensors",
        "clients/0/round-000003.safetensors",
    ],
)
def test_a_damaged_run_is_refused_or_ends_as_it_would_have(
    tiny: Tiny, tmp_path: Path, runs: Path, name: str, damage: Damage
) -> None:
    out, config = shutil.copytree(runs / "stopped", tmp_path / "run"), config_of(tiny)
    source = runs / "other" / name
    if name.startswith("clients"):  # of another client of the same run
        source = out / name.replace("/0/", "/1/")
    damage(out / name, source)
    if damage is swap and name == "config.toml":
        config = RunFolder(out).config()
    if damage is swap and name == "manifest.json":
        assert (out / name).read_bytes() == (runs / "stopped" / name).read_bytes(), "both are of the same data"
    if (error := refusal(config, out)) is not None:
        assert "\n" not in error
        assert str(out) in error
        return
    assert damage is not swap or name.startswith(("manifest", "clients")), "a file of another run is noticed"
    assert but_seconds(lines(out)) == but_seconds(lines(runs / "one"))
    assert (out / "model.safetensors").read_bytes() == (runs / "one" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("damage", [truncate, swap])
def test_a_damaged_summary_of_a_private_run_is_written_again(
    tiny: Tiny, tmp_path: Path, runs: Path, damage: Damage
) -> None:
    out = shutil.copytree(runs / "one", tmp_path / "run")
    damage(out / "summary.json", runs / "other" / "summary.json")
    with open_run(config_of(tiny), out, resume=True) as (session, _):
        assert session.notes[-1] == f"{out}/summary.json did not belong to rounds.jsonl, and was written again from it"
    summaries = [json.loads((run / "summary.json").read_text(encoding="utf-8")) for run in (out, runs / "one")]
    assert but_seconds(summaries[0]) == but_seconds(summaries[1])


def test_a_resume_without_noise_after_rounds_with_noise_is_refused(tiny: Tiny, tmp_path: Path, runs: Path) -> None:
    out = shutil.copytree(runs / "stopped", tmp_path / "run")
    shutil.rmtree(out / "checkpoint")
    plain = tiny("fedavg", *ON, "server.checkpoint_every=1")
    with open_run(plain, tmp_path / "plain") as (_, rounds):
        next(rounds)
    swap(out / "config.toml", tmp_path / "plain" / "config.toml")
    with pytest.raises(InputError, match=r"has epsilon 9\.01 after round 3, but its settings add no noise: one of its"):
        open_run(plain, out, resume=True).__enter__()


def test_the_checkpoint_that_is_kept_longest_is_not_picked_by_accuracy(tiny: Tiny, runs: Path) -> None:
    assert RunFolder(runs / "one").checkpoint_rounds() == [3, 4]
    assert RunFolder(runs / "other").checkpoint_rounds() == [3, 4]
