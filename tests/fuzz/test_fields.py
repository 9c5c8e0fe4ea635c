"""Run folders of somebody who changes a field on purpose, and its checksum with it: used, or refused in one line."""

import copy
import json
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from mutate import VALUES, batches, damaged_value, outcomes
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_run_folders import fault

import fedcir
from fedcir.config import Config
from fedcir.errors import InputError
from fedcir.inference.exporting import export
from fedcir.reporting.evaluation_report import evaluate
from fedcir.reporting.run_report import report
from fedcir.runs.reader import load_run
from fedcir.runtime.resolution import pick_device

CHECKED = ("summary.json", "calibration.json", "manifest.json", "rounds.jsonl", "config.toml")
"""Files that hold a checksum, which is no hindrance for whoever changes them on purpose."""


@pytest.fixture(scope="module")
def whole(tiny: Callable[..., Config], train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run without checksums, as an earlier version wrote it."""
    few = ("server.rounds=2", "local.steps=1", "run.workers=1", "data.val_fraction=0.2", "model.name=cnn")
    run = train(tiny("fedcir", *few), tmp_path_factory.mktemp("whole") / "run")
    for name in CHECKED:
        write_values(run / name, read_values(run / name))
    return run


def read_values(path: Path) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["fedcir"])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if "l" in path.suffix else []
    return lines or json.loads(path.read_text(encoding="utf-8"))


def write_values(path: Path, values: Any) -> None:
    """Write values without their checksums."""
    values = copy.deepcopy(values)
    for item in values if isinstance(values, list) else [values]:
        for folder in (item, item.get("fedcir", {})) if isinstance(item, dict) else ():
            if isinstance(folder, dict):
                folder.pop("checksum", None)
                folder.pop("model", None) if path.name == "summary.json" else None
    if path.suffix == ".toml":
        path.write_text(tomli_w.dumps(values), encoding="utf-8")
    elif path.suffix == ".safetensors":
        save_file(load_file(path), path, {"fedcir": json.dumps(values)})
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(line) + "\n" for line in values), encoding="utf-8")
    else:
        path.write_text(json.dumps(values), encoding="utf-8")


def uses(run: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """What a user does with the model of another."""

    def predict() -> None:
        [result] = fedcir.Predictor(run, device="cpu")([np.zeros((8, 8, 3), np.uint8)])
        assert 0 <= result.probability <= 1

    return {
        "predict": predict,
        "evaluate": lambda: evaluate(run, device="cpu"),
        "export": lambda: export(run, out / "model.safetensors"),
    }


def readers(run: Path, out: Path) -> dict[str, Callable[[], Any]]:
    return {
        "report": lambda: report(run, out=out / "report.html", samples=0),
        "rows": lambda: load_run(run).to_rows(),
        **uses(run, out),
    }


def faults(works: dict[str, Callable[[], Any]]) -> list[str]:
    return [wrong for what, work in works.items() if (wrong := fault(what, work))]


def cards(card: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A card with one field changed to every value, or missing."""
    places: list[tuple[str, ...]] = [(key,) for key in card]
    places += [(key, inner) for key in ("model", "algorithm") for inner in card[key]]
    places += [(key, 0) for key in ("classes", "mean", "std")]  # type: ignore[list-item]
    more = (1, 3, 64, 4096, 10_000, "cnn", "resnet18", "fedavg", [0.5] * 3, [0.0] * 3, ["a", "a", "b"])
    for path in places:
        for value in ("missing", *VALUES, *more):
            changed = copy.deepcopy(card)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            if value == "missing":
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            yield f"{'.'.join(map(str, path))} = {value!r:.60}", changed


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow, id="every one")])
def test_a_changed_card_is_used_or_refused_in_one_line(every: int, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    model = run / "model.safetensors"
    wrong = []
    for number, (what, changed) in enumerate(cards(read_values(whole / "model.safetensors"))):
        if number % every == 0:
            write_values(model, changed)
            wrong += [f"{what}: {item}" for item in faults(uses(run, tmp_path))]
    assert wrong == []


@batches(20)
def test_a_changed_field_is_used_or_refused_in_one_line(seeds: range, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def attempt(rng: random.Random) -> str | None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        name = rng.choice((*CHECKED, "model.safetensors"))
        changed = damaged_value(read_values(run / name), rng)
        try:
            write_values(run / name, changed)
        except (TypeError, ValueError):  # TOML has no such value
            return None
        wrong = faults(readers(run, tmp_path))
        return f"{name}: {'; '.join(wrong)}" if wrong else None

    assert outcomes(seeds, attempt) == []


def test_a_model_that_is_not_finite_is_refused(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    path = run / "model.safetensors"
    arrays, card = load_file(path), read_values(path)
    arrays["head.weight"][0, 0] = float("nan")
    save_file(arrays, path, {"fedcir": json.dumps(card)})
    with pytest.raises(InputError, match=r"model/head\.weight is not finite"):
        fedcir.Predictor(run, device="cpu")


def test_a_model_that_overflows_gives_no_probability_instead_of_nan(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    path = run / "model.safetensors"
    arrays, card = load_file(path), read_values(path)
    arrays["head.weight"].fill_(3e38)
    save_file(arrays, path, {"fedcir": json.dumps(card)})
    with pytest.raises(InputError, match="gives no numbers"):
        fedcir.Predictor(run, device="cpu")([np.full((8, 8, 3), 255, np.uint8)])


@pytest.mark.parametrize("temperature", [1e-320, 1e300, 0.0, float("nan")])
def test_a_temperature_that_no_calibration_gives_is_refused(whole: Path, tmp_path: Path, temperature: float) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    values = read_values(run / "calibration.json")
    write_values(run / "calibration.json", {**values, "temperature": temperature})
    with pytest.raises(InputError, match="temperature must be at"):
        fedcir.Predictor(run, device="cpu")


def test_an_image_size_beyond_memory_is_refused_before_anything_is_allocated(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    card = read_values(run / "model.safetensors")
    write_values(run / "model.safetensors", {**card, "image_size": 10_000})
    with pytest.raises(InputError, match=r"card\.image_size must be at most 4,096, got 10000"):
        fedcir.Predictor(run, device="cpu")
    write_values(run / "model.safetensors", {**card, "image_size": 4096})
    monkeypatch.setattr("fedcir.machine.free_memory", lambda: 10**9)
    with pytest.raises(InputError, match=r"image_size=4096 of .* needs 16\.1 GB"):
        fedcir.Predictor(run, device="cpu")


@pytest.mark.parametrize("device", ["cpu:", "cpu:1", "cpu:x", "cpu:²", "cuda:", ":0", ""])
def test_a_device_that_is_none_is_refused_in_one_line(device: str) -> None:
    with pytest.raises(InputError, match=r"run\.device .* is not available here"):
        pick_device(device)
