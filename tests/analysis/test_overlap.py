"""Images that a run trained on or chose on are found by content and left out of an evaluation."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedcir
from fedcir import InputError
from fedcir.config import Config, config_from_tables
from fedcir.data.splits import hash_images_in_use, hash_samples
from fedcir.inference.evaluation import Evaluation
from fedcir.reporting.evaluation_report import evaluate
from fedcir.reporting.leakage_report import audit
from fedcir.runs.evaluation_data import exclude_seen_images, open_run_data
from fedcir.runtime.run_folder import IMAGE_HASHES, RunFolder

CHANCE = 0.5


def write_noise(root: Path, count: int, seed: int, prefix: str = "") -> Path:
    """Noise in four domains and two classes: there is nothing to learn but the images themselves."""
    rng = np.random.default_rng(seed)
    for folder in (root / domain / label for domain in "abcd" for label in ("x", "y")):
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(folder / f"{prefix}{number}.png")
    return root


def noise_config(root: Path, **data: Any) -> Config:
    tables = {
        "data": {"name": "folders", "root": str(root), "image_size": 12, **data},
        "model": {"width": 8},
        "local": {"steps": 10, "batch_size": 32, "lr": 0.05},
        "server": {"rounds": 15, "eval_every": 15},
        "algorithm": {"name": "fedavg"},
        "run": {"device": "cpu", "workers": 1},
    }
    return config_from_tables(tables)


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noise(tmp_path_factory.mktemp("noise"), count=20, seed=0)


@pytest.fixture(scope="module")
def memorised(noise: Path, train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that knows its 104 training images by heart; 24 more it chose on, and 32 are its test images."""
    return train(noise_config(noise, val_fraction=0.2), tmp_path_factory.mktemp("runs") / "memorised")


@pytest.fixture(scope="module")
def grown(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder to which a site has added 5 images of each class of each domain."""
    root = tmp_path_factory.mktemp("grown") / "data"
    shutil.copytree(noise, root)
    return write_noise(root, count=5, seed=1, prefix="new")


def seen_images(run: Path, root: Path) -> tuple[set[bytes], set[bytes]]:
    """Digests of the files that a manifest says a run trained on, and chose on."""
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    train = [name for client in manifest["clients"] for name in client["train"]]
    aside = [name for names in manifest["validation"].values() for name in names]
    return ({hashlib.blake2b((root / name).read_bytes()).digest() for name in names} for names in (train, aside))  # type: ignore[return-value]


def is_chance(result: Evaluation) -> bool:
    return result.all.accuracy_interval.low < CHANCE < result.all.accuracy_interval.high


@pytest.mark.slow
def test_the_model_knows_its_training_images_by_heart(memorised: Path) -> None:
    result = evaluate(memorised, split="train", device="cpu")
    assert result.all.accuracy > 0.95
    assert (result.overlap.images, result.overlap.trained, result.overlap.chosen) == (104, 104, 0)
    assert result.notes[0].startswith("WARNING: this is no test, and accuracies are too high: of 104 images")


def test_validation_images_come_with_a_warning_too(memorised: Path) -> None:
    result = evaluate(memorised, split="val", device="cpu")
    assert (result.overlap.trained, result.overlap.chosen, len(result.all)) == (0, 24, 24)
    assert result.notes[0].startswith("WARNING: this is no test")


@pytest.mark.parametrize(
    ("options", "images"),
    [({}, 32), ({"set": ["data.test_fraction=0.9"]}, 144), ({"data_root": "grown"}, 40), ({"split": "all"}, 160)],
    ids=["own", "redrawn", "grown", "all"],
)
def test_noise_is_at_chance_wherever_it_is_tested(
    memorised: Path, grown: Path, options: dict[str, Any], images: int
) -> None:
    given = {**options, **({"data_root": grown} if "data_root" in options else {})}
    result = evaluate(memorised, device="cpu", **given)
    assert is_chance(result)
    assert result.overlap.images == len(result.all) + result.overlap.seen == images
    assert result.overlap.unchecked == ""


def test_redrawn_test_images_that_were_seen_are_counted_and_left_out(memorised: Path, grown: Path) -> None:
    """With nine tenths of 25 images of a class, 22 or 23 are tested: all but a few of the 200 images."""
    result = evaluate(memorised, data_root=grown, set=["data.test_fraction=0.9"], split="test", device="cpu")
    trained, chosen = seen_images(memorised, grown)
    assert result.overlap.images == 180
    assert result.overlap.trained <= len(trained) == 104
    assert result.overlap.chosen <= len(chosen) == 24
    assert len(result.all) == 180 - result.overlap.seen
    whole = evaluate(memorised, data_root=grown, split="all", device="cpu")
    assert (whole.overlap.images, whole.overlap.trained, whole.overlap.chosen) == (200, 104, 24)
    assert len(whole.all) == 32 + 40  # its test images, and those that were added
    assert whole.notes[0] == (
        "128 of 200 images are left out: the run trained on 104 of them and chose on 24 (equal content)"
    )
    assert is_chance(whole)


def test_copies_under_the_name_of_another_domain_and_class_are_found(
    memorised: Path, noise: Path, tmp_path: Path
) -> None:
    root = write_noise(tmp_path / "other", count=5, seed=2)
    manifest = fedcir.load_run(memorised).manifest
    first = next(client["train"][0] for client in manifest["clients"] if client["domain"] == "a")
    aside = manifest["validation"]["b"][0]
    (root / "e").mkdir()
    for label in ("x", "y"):
        shutil.copytree(root / "d" / label, root / "e" / label)  # copies of each other, which do not matter here
    shutil.rmtree(root / "d")
    shutil.copyfile(noise / first, root / "e" / "x" / "renamed.png")
    shutil.copyfile(noise / first, root / "b" / "y" / "again.png")
    shutil.copyfile(noise / aside, root / "c" / "y" / "renamed.png")
    result = evaluate(memorised, data_root=root, split="all", device="cpu")
    assert (result.overlap.trained, result.overlap.chosen) == (1, 1)  # copies within a dataset are left out before
    assert len(result.all) == 40


def test_where_nothing_is_left_one_line_says_so(memorised: Path, noise: Path, tmp_path: Path, fedcir: Any) -> None:
    manifest = json.loads((memorised / "manifest.json").read_text(encoding="utf-8"))
    for client in manifest["clients"]:
        for name in client["train"]:
            (tmp_path / "seen" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(noise / name, tmp_path / "seen" / name)
    output = fedcir("evaluate", memorised, "--data-root", tmp_path / "seen", "--split", "all", "--device", "cpu")
    assert output.code == 2
    assert output.err.splitlines()[-1] == (
        "fedcir: no image of folders (all) is left to test on: of 104 images, the run trained on 104 and chose on 0; "
        "add images that it has not seen"
    )


def test_the_command_tells_what_is_left_out_in_a_line_and_as_json(memorised: Path, fedcir: Any, tmp_path: Path) -> None:
    output = fedcir("evaluate", memorised, "--split", "all", "--device", "cpu", "--json", "-o", tmp_path / "page")
    assert "note: 128 of 160 images are left out: the run trained on 104 of them and chose on 24" in output.err
    overlap = {"checked": True, "images": 160, "trained_on": 104, "chosen_on": 24, "left_out": 128}
    assert json.loads(output.out)["overlap"] == overlap


def test_a_run_without_hashes_is_checked_by_the_names_in_its_manifest(
    memorised: Path, grown: Path, noise: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(memorised, old)
    (old / IMAGE_HASHES).unlink()
    result = evaluate(old, data_root=grown, split="all", device="cpu")
    assert (result.overlap.trained, result.overlap.chosen) == (104, 24)
    name = fedcir.load_run(old).manifest["clients"][0]["train"][0]
    moved = noise_config(tmp_path / "nowhere").data
    run = fedcir.load_run(old)
    run = replace(run, config=replace(run.config, data=moved))
    partly = tmp_path / "partly"
    shutil.copytree(noise, partly)
    (partly / name).unlink()
    unknown = evaluate(run, data_root=partly, split="all", device="cpu")
    assert unknown.overlap.unchecked
    assert unknown.notes[0] == (
        "whether the model was trained on any of these images could not be checked: the run has no "
        "image_hashes.safetensors, and the images that its manifest names cannot all be found"
    )
    assert unknown.to_json()["overlap"]["checked"] is False


def test_of_a_deployed_run_a_line_says_that_nothing_can_be_checked(
    memorised: Path, noise: Path, tmp_path: Path
) -> None:
    shutil.copytree(memorised, tmp_path / "deployed")
    (tmp_path / "deployed" / IMAGE_HASHES).unlink()
    run = fedcir.load_run(tmp_path / "deployed")
    counts = [
        {"id": c["id"], "domain": c["domain"], "train": len(c["train"]), "test": 8} for c in run.manifest["clients"]
    ]
    run = replace(run, manifest={"clients": counts, "hash": "", "key": "0"})
    result = evaluate(run, data_root=noise, device="cpu")
    assert result.notes[0].endswith("could not be checked: sites do not tell the server which images they hold")


def test_an_audit_and_a_diagnosis_compare_with_images_that_the_run_has_not_seen(
    memorised: Path, noise: Path, tmp_path: Path
) -> None:
    """Hashes of a run say that it trained on two of its test images too, as those of a damaged split would."""
    shutil.copytree(memorised, tmp_path / "run")
    run = fedcir.load_run(tmp_path / "run")
    _, domains, shares = open_run_data(run)
    hashes = hash_images_in_use(domains, shares)
    more = hash_samples(domains["a"].test, "file")[:2]  # type: ignore[index]
    RunFolder(run.path).create(run.config, run.manifest, replace(hashes, train=np.sort([*hashes.train, *more])))
    clean, overlap = exclude_seen_images(run, domains)
    assert [len(domain.test) for domain in clean] == [6, 8, 8, 8]
    assert overlap.trained == 2
    result = audit(run, samples=10, steps=0)
    assert [item.others for item in result.membership] == [6, 8, 8, 8]
    assert result.notes == tuple(overlap.notes)


def test_files_cannot_be_compared_with_arrays_and_a_line_says_so(memorised: Path, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (8, 12, 12, 3), dtype=np.uint8)
    labels = np.arange(8) % 2
    np.savez(tmp_path / "a.npz", x_train=images[:4], y_train=labels[:4], x_test=images[4:], y_test=labels[4:])
    run = fedcir.load_run(memorised)
    run.card["classes"] = ["0", "1"]
    result = evaluate(run, dataset="arrays", data_root=tmp_path, device="cpu")
    assert result.overlap.unchecked == "the run keeps hashes of files, and the images of arrays are no files"


def test_a_changed_folder_is_refused_without_naming_the_option_that_redraws_the_split(
    noise: Path, memorised: Path, grown: Path
) -> None:
    run = fedcir.load_run(memorised)
    moved = replace(run, config=replace(run.config, data=replace(run.config.data, root=str(grown))))
    with pytest.raises(InputError) as refused:
        evaluate(moved, device="cpu")
    assert str(refused.value).endswith(f"are not those that {memorised} ran on: restore the folder as it was then")
    assert "data_root" not in str(refused.value)


def test_arrays_are_compared_by_their_pixels(
    tmp_path: Path, train: Callable[..., Path], tiny: Callable[..., Config], data_root: Path
) -> None:
    run = train(tiny("fedavg", "server.rounds=1", "data.val_fraction=0.25"), tmp_path / "run")
    (tmp_path / "other").mkdir()
    with np.load(data_root / "ink.npz") as file:
        arrays = dict(file)
    arrays["x_test"][:7] = arrays["x_train"][:7]  # trained on, or chosen on
    np.savez(tmp_path / "other" / "wax.npz", **arrays)
    result = evaluate(run, data_root=tmp_path / "other", device="cpu")
    assert result.overlap.seen == 7
    assert len(result.all) == 5


def test_hashes_take_eight_bytes_an_image_and_are_equal_for_equal_runs(
    memorised: Path, noise: Path, train: Callable[..., Path], tmp_path: Path
) -> None:
    again = train(noise_config(noise, val_fraction=0.2), tmp_path / "again", until=1)
    content = (memorised / IMAGE_HASHES).read_bytes()
    assert (again / IMAGE_HASHES).read_bytes() == content
    assert len(content) < 8 * 128 + 400
    hashes = RunFolder(memorised).image_hashes()
    assert hashes is not None
    assert (len(hashes.train), len(hashes.validation)) == (104, 24)
    whole = [hashlib.blake2b(path.read_bytes(), digest_size=16).digest() for path in sorted(noise.rglob("*.png"))]
    every = {int.from_bytes(digest[:8], "little") for digest in whole}
    assert {*hashes.train.tolist(), *hashes.validation.tolist()} < every


def test_damaged_hashes_are_named(memorised: Path, tmp_path: Path) -> None:
    shutil.copytree(memorised, tmp_path / "run")
    path = tmp_path / "run" / IMAGE_HASHES
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"image_hashes\.safetensors: its checksum is .*; delete it, and resume"):
        evaluate(tmp_path / "run", device="cpu")
