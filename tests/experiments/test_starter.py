"""The first file of settings: what was measured, what follows from it, and that it runs."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.algorithms import resolve_config
from fedcir.config import DEFAULT_COMPARISON, ConfigRequest
from fedcir.errors import InputError
from fedcir.experiments import starter as starter_module
from fedcir.experiments.comparison import _default_methods
from fedcir.experiments.recommendation import recommend
from fedcir.experiments.starter import DatasetProfile, Starter, choose_settings, init
from fedcir.reporting.diagnosis_report import diagnose
from fedcir.runtime.simulation import open_run

REAL = Path(__file__).parents[3] / "shared" / "data" / "office_caltech10"


def write(folder: Path, count: int, brightness: int, size: int = 16) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(brightness)
    for number in range(count):
        pixels = rng.integers(0, 50, (size, size, 3)) + brightness
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains of two classes, one of them darker."""
    root = tmp_path_factory.mktemp("start") / "photos"
    for domain, bright in (("day", 150), ("night", 0)):
        for label, more in (("cat", 0), ("dog", 50)):
            write(root / domain / label, 60, bright + more)
    return root


@pytest.fixture(scope="module")
def starter(photos: Path) -> Starter:
    return init(photos)


def chosen(look: DatasetProfile) -> dict[str, Any]:
    return {choice.setting: choice.value for choice in choose_settings(look)}


def look(**more: Any) -> DatasetProfile:
    counts = {"day": 1200, "night": 800}
    return DatasetProfile(**{"counts": counts, "classes": 7, "side": 300, "shift": 1.5, "skew": 0.2, **more})


def test_the_file_runs_as_it_is(starter: Starter, tmp_path: Path) -> None:
    starter.save(tmp_path / "fedcir.toml")
    config = resolve_config(
        ConfigRequest(file=tmp_path / "fedcir.toml", options={"rounds": 1, "local_steps": 1, "workers": 1})
    )
    assert (config.algorithm.name, config.model.norm, config.local.prior) == ("fedcirplus", "invariant", "client")
    with open_run(config) as (_, rounds):
        (record,) = rounds
    assert set(record.accuracy or {}) == {"day", "night"}
    assert record.validation is not None


def test_every_choice_stands_under_its_reason(starter: Starter) -> None:
    lines = starter.toml().splitlines()
    for choice in starter.choices:
        name = choice.setting.partition(".")[2]
        assert any(line.startswith(f"{name} = ") and before.startswith("# ") for before, line in pairwise(lines))
    assert "#   day        120                 60               60" in lines
    assert "# What was found: 2 domains, 2 classes, 240 images." in lines
    assert "There is no label skew" in " ".join(starter.findings)
    assert max(len(line) for line in lines if str(starter.data.root) not in line) <= 100


def test_other_test_images_change_nothing(data_root: Path, tmp_path: Path) -> None:
    for path in data_root.iterdir():
        arrays = dict(np.load(path))
        arrays["x_test"] = np.random.default_rng(7).integers(0, 256, arrays["x_test"].shape).astype(np.uint8)
        np.savez(tmp_path / path.name, **arrays)
    one, two = (init(root, dataset="arrays") for root in (data_root, tmp_path))
    assert (one.findings, one.choices) == (two.findings, two.choices)
    assert "data.test_fraction" not in {choice.setting for choice in one.choices}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"data.image_size": 64, "model.name": "cnn", "algorithm.name": "fedcirplus", "server.rounds": 100}),
        ({"gpu": True}, {"data.image_size": 128, "model.name": "resnet18", "server.rounds": 200}),  # 640 a round of 640
        ({"side": 28}, {"data.image_size": 28, "model.name": "cnn"}),
        ({"side": 50, "gpu": True}, {"data.image_size": 48, "model.name": "cnn"}),
        ({"shift": 0.3, "skew": 0.05}, {"algorithm.name": "fedavg"}),
        ({"shift": 0.3, "skew": 0.4}, {"algorithm.name": "fedcirplus"}),
        ({"shift": None, "skew": None}, {"algorithm.name": "fedcirplus"}),
        ({"counts": {"day": 2000, "night": 1000}}, {"data.val_fraction": 0.1, "local.batch_size": 32}),
        ({"counts": {"day": 100, "night": 60}}, {"data.val_fraction": 0.2, "local.batch_size": 16}),  # 38 to train on
        ({"counts": {"day": 100, "night": 40}}, {"local.batch_size": 8, "server.rounds": 60}),  # 200 * 45 / 160 = 56
    ],
)
def test_settings_follow_from_what_was_measured(
    more: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter_module, "PRETRAINED_PACKAGE", "no_such_package")
    assert expected.items() <= chosen(look(**more)).items()


def reason(look: DatasetProfile) -> str:
    return next(choice.why for choice in choose_settings(look) if choice.setting == "algorithm.name")


def test_one_message_is_the_first_choice_for_a_frozen_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter_module, "PRETRAINED_PACKAGE", "json")
    for profile in (look(shift=1.65, skew=0.13), look(shift=1.65, skew=0.4), look(shift=None, skew=None)):
        assert chosen(profile)["algorithm.name"] == "fedcirone"
        assert reason(profile).startswith("One message instead of rounds")


def test_reasons_use_the_words_of_the_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter_module, "PRETRAINED_PACKAGE", "no_such_package")
    assert "because feature shift is large (1.50 of 2) and label skew is moderate (20%)" in reason(look())
    assert "because feature shift is moderate (1.15 of 2)." in reason(look(shift=1.15, skew=0.05))
    small = reason(look(shift=0.49, skew=0.05))
    assert small == "Plain averaging, because feature shift is small (0.49 of 2) and label skew is small (5%)."


@pytest.mark.slow
def test_init_recommend_and_diagnose_agree_on_the_shift(photos: Path, starter: Starter) -> None:
    options = {"dataset": "folders", "data_root": photos}
    message = diagnose(**options, out=None).verdict
    assert message == starter.findings
    pilot = recommend(**options, pilot_rounds=1, seeds=(0, 1), set={"local.steps": 1, "model.width": 2}, workers=1)
    assert list(pilot.findings) == starter.findings


def test_images_are_set_aside_only_where_the_data_do_not_say_so_and_have_some_to_spare() -> None:
    assert {"data.test_fraction", "data.val_fraction"} <= chosen(look()).keys()
    assert not {"data.test_fraction", "data.val_fraction"} & chosen(look(has_test=True, has_validation=True)).keys()
    assert "data.val_fraction" not in chosen(look(counts={"day": 30, "night": 30}))  # 5 images for 7 classes


def test_a_pretrained_encoder_is_for_few_photographs_and_only_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starter_module, "PRETRAINED_PACKAGE", "json")
    few = chosen(look())
    assert (few["model.name"], few["model.freeze"], few["model.native_size"]) == ("efficientnet-lite0", True, True)
    assert (few["data.image_size"], chosen(look(side=130))["data.image_size"]) == (224, 128)
    assert chosen(look(side=32))["model.name"] == "cnn"
    assert chosen(look(counts={"day": 19_000, "night": 800}))["model.name"] == "cnn"
    monkeypatch.setattr(starter_module, "PRETRAINED_PACKAGE", "no_such_package")
    assert chosen(look())["model.name"] == "cnn"


def test_what_cannot_be_trained_on_is_refused(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "day", tmp_path / "one" / "day")
    shutil.copytree(tmp_path / "one", tmp_path / "apart")
    write(tmp_path / "apart" / "night" / "Cats", 9, 20)
    write(tmp_path / "apart" / "night" / "Dogs", 9, 90)
    (tmp_path / "empty").mkdir()
    for name, message in {
        "nowhere": "there is no folder",
        "empty": "empty holds no images; it should hold <domain>/<class>/<image>",
        "one": "has one domain only, 'day'",
        "apart": "domain 'day' of .* has no class of the others: it has cat, dog, they have Cats, Dogs",
    }.items():
        with pytest.raises(InputError, match=message):
            init(tmp_path / name)


def test_a_class_that_a_domain_lacks_and_copies_are_mentioned(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "photos")
    write(tmp_path / "photos" / "day" / "fox", 12, 100)
    shutil.copy(tmp_path / "photos/day/fox/0.png", tmp_path / "photos/day/fox/copy.png")
    message = init(tmp_path / "photos").findings
    assert "Note: night has no image of fox." in message
    assert "Note: 1 copy of another image is left out." in message


def test_the_command_writes_once_and_never_among_the_data(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedcir: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = fedcir("init", photos)
    assert output.code == 0
    assert "Next: `fedcir run fedcir.toml`" in output.out
    assert 'algorithm.name = "fedcirplus"' in output.out
    written = (tmp_path / "fedcir.toml").read_bytes()
    for arguments, named in (
        ([photos], "fedcir.toml exists: name another file, or write over it with force"),
        ([photos, "--out", photos / "fedcir.toml"], "would lie among the data"),
        ([photos, "--out", "no/fedcir.toml"], "there is no folder no"),
        ([tmp_path / "nowhere", "--out", "x.toml"], "there is no folder"),
    ):
        refused = fedcir("init", *arguments)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
        assert named in refused.err
    assert fedcir("init", photos, "--force", "--quiet").out == ""
    assert (tmp_path / "fedcir.toml").read_bytes() == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fedcir.toml"]
    assert sorted(path.name for path in photos.iterdir()) == ["day", "night"]


def test_compare_takes_the_method_that_a_file_names_beside_fedavg_and_a_ceiling() -> None:
    assert _default_methods(None, frozen=False) == list(DEFAULT_COMPARISON)
    assert _default_methods("fedprox", frozen=False) == ["fedavg", "fedprox", "centralized"]
    assert _default_methods("fedavg", frozen=True) == ["fedavg", "fedcirone", "centralized"]
    assert _default_methods("fedcirone", frozen=True) == ["fedavg", "fedcirone", "centralized"]


@pytest.mark.skipif(not REAL.is_dir(), reason="no Office-Caltech-10 in ../shared/data")
def test_real_photographs_get_settings_with_reasons() -> None:
    starter = init(REAL)
    assert sum(starter.profile.counts.values()) == 2533
    assert starter.profile.side == 128
    assert starter.profile.shift is not None
    assert starter.profile.shift > 1
    assert "Note: 26 copies of other images are left out." in starter.findings
