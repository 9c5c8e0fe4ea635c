"""Whatever happens to a file that a resume reads, epsilon never falls below what is on record."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from crossing import across, rounds, shares
from grid import run_of_flower  # noqa: F401

from fedcir.config import Config
from fedcir.errors import InputError
from fedcir.runtime.session import Session

Tiny = Callable[..., Config]
FILES = ("config.toml", "manifest.json", "rounds.jsonl", "checkpoint/round-000005.safetensors", "releases")
EPSILON = 17.8
"""Of nine releases with noise 1: five rounds, and four that were repeated. Without these it would be 12.3."""


def config_of(tiny: Tiny, noise: float = 1.0) -> Config:
    few = ("server.rounds=6", "run.workers=1", "model.norm=group", "local.steps=1", "server.eval_every=6")
    return tiny("fedavg", *few, "privacy.clip=1", f"privacy.noise={noise}")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("begun")


@pytest.fixture
def begun(tiny: Tiny, shelf: Path) -> Path:
    """Two runs after round 5, `one` with repeated rounds and `other` with more noise; made for the first test only."""
    if not (shelf / "other").exists():
        session = across(shares(shelf), config_of(tiny), shelf / "one", until=4)
        assert session.releases is not None
        for _ in range(4):
            session.releases.add()
        across(shares(shelf), config_of(tiny), shelf / "one", resume=True, until=5)
        across(shares(shelf), config_of(tiny, noise=4.0), shelf / "other", until=5)
    return shelf


def resume(folder: Path, config: Config) -> Session | InputError:
    try:
        return across(shares(folder), config, folder / "one", resume=True)
    except InputError as error:
        return error


def delete(file: Path, other: Path) -> None:
    file.unlink()


def truncate(file: Path, other: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def swap(file: Path, other: Path) -> None:
    shutil.copyfile(other, file)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage) if damage is delete else pytest.param(name, damage, marks=pytest.mark.slow)
        for name in FILES
        for damage in (delete, truncate, swap)
    ],
)
def test_epsilon_does_not_fall_when_a_file_is_lost_cut_or_swapped(
    tiny: Tiny, tmp_path: Path, begun: Path, name: str, damage: Callable[[Path, Path], None]
) -> None:
    shutil.copytree(begun, tmp_path / "copy")
    out, config = tmp_path / "copy" / "one", config_of(tiny)
    assert rounds(out)[-1]["epsilon"] == pytest.approx(EPSILON, abs=0.05)
    damage(out / name, begun / "other" / name)
    settings = (
        replace(config, privacy=replace(config.privacy, noise=4.0)) if (name, damage) == (FILES[0], swap) else config
    )
    outcome = resume(tmp_path / "copy", settings)
    if isinstance(outcome, InputError):
        assert "\n" not in str(outcome)
        assert str(out) in str(outcome)
        return
    assert name.startswith(("rounds", "checkpoint")), "only rounds that are lost can be repeated"
    assert damage is not swap, "a file of another run is noticed"
    assert (outcome.records[-1].epsilon or 0) > EPSILON
    assert any("were begun before, and epsilon counts them too" in note for note in outcome.notes)


def test_a_run_whose_releases_are_lost_is_refused_in_one_line(tiny: Tiny, tmp_path: Path, begun: Path) -> None:
    shutil.copytree(begun, tmp_path / "copy")
    out = tmp_path / "copy" / "one"
    (out / "releases").unlink()
    with pytest.raises(InputError) as caught:
        across(shares(tmp_path / "copy"), config_of(tiny), out, resume=True)
    assert str(caught.value) == (
        f"cannot read {out}/releases: No such file or directory; restore it, or start anew in another folder: "
        "without it, epsilon would be too small"
    )


def test_a_count_of_releases_of_an_earlier_version_is_still_read(tiny: Tiny, tmp_path: Path, begun: Path) -> None:
    shutil.copytree(begun, tmp_path / "copy")
    out = tmp_path / "copy" / "one"
    (out / "releases").write_bytes(b"." * 9)
    session = across(shares(tmp_path / "copy"), config_of(tiny), out, resume=True)
    assert session.releases is not None
    assert session.releases.count() == 10
    (out / "releases").write_bytes(b"." * 3)
    with pytest.raises(InputError, match=r"releases counts 3 rounds, but 6 are on record"):
        across(shares(tmp_path / "copy"), config_of(tiny), out, resume=True)
