"""Classes that sites spell differently, and images that they label differently."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.opening import open_dataset
from fedcir.data.sources.source import find_spelling_variants, notes_on_spelling

Fedcir = Callable[..., Any]


def draw(root: Path, *places: str) -> Path:
    for path in places:
        (root / path).mkdir(parents=True)
        for number in range(5):
            seed = list(f"{path}/{number}".encode())
            noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / path / f"{number}.png")
    return root


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Dog", "dog"), ("back_pack", "backpack"), ("headphone", "headphones"), ("box", "boxes"),
        ("ice cream", "IceCream"), ("Laptop-Computer", "laptop_computer"), ("tumor", "tumour"),
        ("giraffe", "girafe"), ("skin_tumor", "skin tumour"), ("caf\u00e9", "cafe\u0301"),
    ],
)  # fmt: skip
def test_names_of_one_class_at_two_sites_are_found(one: str, other: str) -> None:
    assert find_spelling_variants({"a": [one, "emu"], "b": [other, "emu"]}) == [tuple(sorted((one, other)))]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cat", "car"), ("horse", "house"), ("grade_i", "grade_ii"), ("stage 1", "stage 2"), ("level_10", "level_11"),
        ("normal", "abnormal"), ("typical", "atypical"), ("HER2+", "HER2-"), ("MR", "MRS"), ("1.5", "15"),
        ("1_2", "12"), ("-1", "1"), ("benign", "malignant"), ("\U0001f408", "\U0001f415"), ("+", "-"),
    ],
)  # fmt: skip
def test_names_of_two_classes_are_left_alone(one: str, other: str) -> None:
    assert find_spelling_variants({"a": [one, "emu"], "b": [other, "emu"]}) == []


def test_a_site_that_has_both_means_both() -> None:
    assert find_spelling_variants({"a": ["Dog", "cat"], "b": ["dog", "cat"], "c": ["Dog", "dog"]}) == []


def test_thousands_of_classes_are_compared_at_once() -> None:
    classes = {"a": [f"Class {i} of many" for i in range(1000)], "b": [f"class_{i}_of_many" for i in range(990, 1010)]}
    assert len(find_spelling_variants(classes)) == 10


def test_the_note_names_both_and_their_sites() -> None:
    sites = {name: ["dog", "cat"] for name in "bcdef"}
    assert notes_on_spelling({"a": ["Dog", "cat"], **sites}) == (
        "'Dog' (a) and 'dog' (b, c, d and 2 more) count as two classes: if they are one, give them one name",
    )


def test_classes_spelt_differently_are_told_by_the_check_and_by_a_run(tmp_path: Path, fedcir: Fedcir) -> None:
    root = draw(tmp_path, "a/cat", "a/Dog", "b/cat", "b/dog")
    note = "'Dog' (a) and 'dog' (b) count as two classes: if they are one, give them one name"
    output = fedcir("data", "check", "folders", "--data-root", root, "--image-size", 8)
    assert output.code == 0
    assert f"warning: {note}\n" in output.out
    assert open_dataset(DataConfig("folders", str(root), image_size=8), seed=0).notes == (note,)
    draw(root, "a/emu")
    chosen = DataConfig("folders", str(root), image_size=8, classes=("cat", "dog", "emu"))
    assert open_dataset(chosen, seed=0).notes == ()


@pytest.mark.parametrize("where", ["a", "b"], ids=["one site", "two sites"])
def test_one_image_under_two_classes_is_told_by_the_check_and_by_a_run(
    where: str, tmp_path: Path, fedcir: Fedcir
) -> None:
    root = draw(tmp_path, "a/cat", "a/dog", "b/cat", "b/dog")
    shutil.copy(root / "a/cat/0.png", root / f"{where}/dog/wrong.png")
    shutil.copy(root / "b/cat/1.png", root / "b/cat/twin.png")
    options = ["data", "check", "folders", "--data-root", root, "--image-size", 8]
    output = fedcir(*options)
    assert output.code == 0
    line = f"warning: one image in two classes, so one label is wrong: a/cat/0.png = {where}/dog/wrong.png\n"
    assert output.out.count("one label is wrong") == output.out.count(line) == 1
    assert json.loads(fedcir(*options, "--json").out)["disputed"] == [["a/cat/0.png", f"{where}/dog/wrong.png"]]
    assert open_dataset(DataConfig("folders", str(root), image_size=8), seed=0).notes == (
        "2 of 22 files are copies of others and are left out",
        f"one image is in folders of different classes, as a/cat/0.png and as {where}/dog/wrong.png; "
        "one copy of each is used: remove the wrong ones",
    )
