"""Folders train, val and test within a dataset of folders."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.domains import Domains
from fedcir.data.opening import open_dataset, open_site
from fedcir.errors import InputError

Fedcir = Callable[..., Any]
CLASSES = ("cat", "dog")


def draw(root: Path, *places: str, count: int = 4, classes: tuple[str, ...] = CLASSES) -> Path:
    """So many images a class in each place, no two the same."""
    for path in (f"{path}/{label}" for path in places for label in classes):
        (root / path).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            seed = list(f"{path}/{number}".encode())
            noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / path / f"{number}.png")
    return root


def opened(root: Path, **settings: Any) -> Domains:
    return open_dataset(DataConfig("folders", str(root), image_size=8, **settings), seed=0)


def places(domains: Domains, name: str) -> list[set[str]]:
    """The folders above the classes from which a domain's training, validation and test images come."""
    domain = domains[name]
    parts = [part.ids if part is not None else [] for part in (domain.train, domain.validation, domain.test)]
    return [{item.rsplit("/", 2)[0] for item in ids} for ids in parts]


def test_a_folder_of_train_and_test_is_used_as_the_split(tmp_path: Path) -> None:
    domains = opened(draw(tmp_path, "a/train", "a/test", "b/train", "b/test"))
    assert (domains.names, domains.classes) == (("a", "b"), CLASSES)
    assert places(domains, "a") == [{"a/train"}, set(), {"a/test"}]
    assert [(len(domain.train), len(domain.test)) for domain in domains] == [(8, 8)] * 2
    assert domains.notes == ("all domains: the folders train and test are used as the split",)


def test_train_and_test_may_lie_above_the_sites(tmp_path: Path) -> None:
    domains = opened(draw(tmp_path, "train/b", "train/a", "test/a", "test/b", "val/a", "val/b"))
    assert (domains.names, domains.classes) == (("a", "b"), CLASSES)
    assert places(domains, "b") == [{"train/b"}, {"val/b"}, {"test/b"}]
    ids = [item for domain in domains for part in (domain.train, domain.test) for item in part.ids]
    assert len(set(ids)) == 32
    assert all((tmp_path / item).is_file() for item in ids)


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [("train", "val", "test"), ("training", "valid", "testing"), ("Train", "VALIDATION", "Test")],
)
def test_the_usual_spellings_are_known_in_any_case(train: str, val: str, test: str, tmp_path: Path) -> None:
    domains = opened(draw(tmp_path, *(f"a/{part}" for part in (train, val, test))))
    assert places(domains, "a") == [{f"a/{train}"}, {f"a/{val}"}, {f"a/{test}"}]
    assert domains.notes == (
        "a: the folders train, val and test are used as the split; the best round is picked on val",
    )


def test_without_a_test_folder_the_val_folder_is_tested_on(tmp_path: Path) -> None:
    domains = opened(draw(tmp_path, "a/train", "a/val"))
    assert places(domains, "a") == [{"a/train"}, set(), {"a/val"}]
    assert domains.notes == (
        "a: the folders train and val are used as the split; there is no folder test, so val is tested on",
    )


def test_sites_with_and_without_a_split_go_together(tmp_path: Path) -> None:
    draw(tmp_path, "a/train", "a/test", "c/train", "c/valid")
    domains = opened(draw(tmp_path, "b", count=10))
    assert places(domains, "a") == [{"a/train"}, set(), {"a/test"}]
    assert [len(part) for part in (domains["b"].train, domains["b"].test)] == [16, 4]
    assert domains.notes == (
        "a: the folders train and test are used as the split",
        "c: the folders train and val are used as the split; there is no folder test, so val is tested on",
        "b: there are no folders train and test, so test images are drawn at random",
    )


@pytest.mark.parametrize("label", ["train", "test", "Valid"])
def test_a_class_may_be_called_as_a_part_of_a_split(label: str, tmp_path: Path) -> None:
    domains = opened(draw(tmp_path, "a", classes=("car", "bus", label)))
    assert set(domains.classes) == {"car", "bus", label}
    assert domains.notes == ()


def test_a_share_for_validation_is_drawn_only_where_there_is_no_val_folder(tmp_path: Path) -> None:
    domains = opened(draw(tmp_path, "a/train", "a/val", "a/test", "b/train", "b/test"), val_fraction=0.5)
    assert places(domains, "a") == [{"a/train"}, {"a/val"}, {"a/test"}]
    assert places(domains, "b") == [{"b/train"}, {"b/train"}, {"b/test"}]
    assert len(domains["b"].train) == 4
    assert domains.notes[-1] == "data.val_fraction=0.5 is not used for domains that have validation images: a"


def test_of_copies_in_several_parts_the_test_image_stays_and_then_the_one_to_validate_on(tmp_path: Path) -> None:
    draw(tmp_path, "a/train", "a/val", "a/test")
    shutil.copy(tmp_path / "a/train/cat/0.png", tmp_path / "a/val/cat/copy.png")
    shutil.copy(tmp_path / "a/val/cat/1.png", tmp_path / "a/test/cat/copy.png")
    [domain] = opened(tmp_path)
    assert "a/train/cat/0.png" not in domain.train.ids
    assert domain.validation is not None
    assert "a/val/cat/copy.png" in domain.validation.ids
    assert "a/val/cat/1.png" not in domain.validation.ids
    assert "a/test/cat/copy.png" in domain.test.ids


REFUSED = {
    "a stray class": (["a/train", "a/test", "a"], "/a mixes a split (test and train) with other folders (cat): "),
    "a stray site": (["train/a", "test/a", "b"], " mixes a split (test and train) with other folders (b): "),
    "test beside classes": (["a", "a/test"], "/a mixes a split (test) with other folders (cat): "),
    "train alone": (["a/train"], "/a holds train but no test: "),
    "no train": (["a/test", "a/val"], "/a holds test and val but no train: "),
    "train alone above": (["train/a"], " holds train but no test: "),
}


@pytest.mark.parametrize("how", REFUSED)
def test_half_a_split_is_refused_in_one_line_that_names_it(how: str, tmp_path: Path, fedcir: Fedcir) -> None:
    made, message = REFUSED[how]
    output = fedcir("data", "check", "folders", "--data-root", draw(tmp_path, *made))
    assert (output.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert output.err.startswith(f"fedcir: {tmp_path}{message}")


def test_a_split_without_sites_is_told_apart_from_two_sites(tmp_path: Path, fedcir: Fedcir) -> None:
    output = fedcir("data", "check", "folders", "--data-root", draw(tmp_path, "train", "test"))
    assert (output.code, output.out) == (2, "")
    assert "holds images as test/<class>/<image>, such as test/cat/0.png; it should hold <domain>/" in output.err


@pytest.mark.parametrize(("gone", "kind"), [("train/b", "training"), ("test/b", "test")])
def test_a_site_that_is_in_one_part_only_is_named(gone: str, kind: str, tmp_path: Path) -> None:
    shutil.rmtree(draw(tmp_path, "train/a", "train/b", "test/a", "test/b") / gone)
    with pytest.raises(InputError, match=f"the split has no {kind} image of domain 'b'"):
        opened(tmp_path)


def test_folders_without_images_beside_a_split_do_no_harm(tmp_path: Path) -> None:
    draw(tmp_path, "a/train", "a/test")
    for name in ("val", "logs", "__MACOSX"):
        (tmp_path / "a" / name).mkdir()
    assert opened(tmp_path).notes == ("a: the folders train and test are used as the split",)


def test_a_site_of_its_own_has_the_split_that_it_has_among_others(tmp_path: Path) -> None:
    draw(tmp_path, "a/train", "a/val", "a/test", "b")
    config = DataConfig("folders", str(tmp_path), image_size=8)
    alone = open_site(tmp_path / "a", "a", config, seed=0)
    assert alone.notes == ("a: the folders train, val and test are used as the split; the best round is picked on val",)
    [here], there = alone, open_dataset(config, seed=0)["a"]
    for name in ("train", "validation", "test"):
        one, other = getattr(here, name), getattr(there, name)
        assert list(one.ids) == list(other.ids)
        assert np.array_equal(one.pixels(range(len(one))), other.pixels(range(len(other))))


def test_the_split_is_said_by_the_check_and_by_a_run(tmp_path: Path, fedcir: Fedcir) -> None:
    root = ["--data-root", draw(tmp_path / "data", "a/train", "a/val", "a/test"), "--image-size", 8]
    note = "note: a: the folders train, val and test are used as the split; the best round is picked on val\n"
    assert note in fedcir("data", "check", "folders", *root).out
    small = "--rounds 1 --local-steps 1 --algorithm fedavg --device cpu --set model.width=2 --no-report"
    output = fedcir("run", "--dataset", "folders", *root, *small.split(), "-o", tmp_path / "run")
    assert output.code == 0
    assert note in output.err
    assert "the best round is picked on validation data" in output.out
    shown = fedcir("data", "show", "folders", *root, "-o", tmp_path / "sheet.png").out
    assert [line.split() for line in shown.splitlines() if line.strip().startswith(("domain", "a "))] == [
        ["domain", "train", "validation", "test"],
        ["a", "8", "8", "8"],
    ]
