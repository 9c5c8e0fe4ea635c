"""Files that a dataset of folders does not use."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.data.sources.folders import list_folder_images, list_site_folder
from fedcir.data.sources.published import PACS
from fedcir.data.sources.source import kind_of, notes_on_unused

Fedcir = Callable[..., Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sites of two classes, and nothing else."""
    rng = np.random.default_rng(0)
    for path in (tmp_path / "data" / domain / label for domain in ("a", "b") for label in ("cat", "dog")):
        path.mkdir(parents=True)
        for number in range(5):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path / f"{number}.png")
    return tmp_path / "data"


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def told(root: Path) -> list[str]:
    return [str(item) for item in list_folder_images(root).unused]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("1.heic", ".heic"), ("1.HEIC", ".heic"), ("brain.nii.gz", ".nii.gz"), ("a.tar.gz", ".tar.gz"), ("x.gz", ".gz"),
        ("a.b.gif", ".gif"), ("LICENSE", ""), ("1.2.840.113619.2.5", ""), ("scan.001", ""), ("1.JPG", "image"),
        ("Dr. No said so", ""), ("x.", ""),
    ],
)  # fmt: skip
def test_the_kind_of_a_file_is_its_ending_unless_that_is_a_number(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_file_that_is_not_used_is_counted_by_kind_and_place(root: Path) -> None:
    touch(root, *(f"a/cat/{i}.heic" for i in range(12)), "a/cat/deep/1.HEIC", "b/cat/1.heic", "b/dog/brain.nii.gz")
    touch(root, "b/1.png", "b/2.jpg", "b/3.PNG", "0.png", "b/dog/1.gif", "README.md", "a/cat/labels.csv")
    assert told(root) == [
        "3 images directly in b: move into a class folder",
        "1 image directly in the data root: move into a class folder",
        "13 .heic files in a/cat: convert to PNG",
        "1 .md file in the data root",
        "1 .csv file in a/cat",
        "1 .heic file in b/cat: convert to PNG",
        "1 .gif file in b/dog: save one frame as PNG",
        "1 .nii.gz file in b/dog: save slices as PNG",
    ]  # fmt: skip


def test_what_is_hidden_or_left_by_systems_is_not_told(root: Path) -> None:
    touch(root, ".DS_Store", "a/Thumbs.db", "a/cat/desktop.ini", "a/cat/._1.png", ".git/config", "__MACOSX/a/x.bin")
    assert told(root) == []


def test_images_beside_the_classes_of_a_split_are_counted(root: Path) -> None:
    os.renames(root / "a", root / "a2/train")
    os.renames(root / "b", root / "a2/test")
    touch(root, "a2/test/1.png", "a2/x.heic", "a2/train/cat/y.heic")
    assert told(root) == [
        "1 image directly in a2/test: move into a class folder",
        "1 .heic file in a2: convert to PNG",
        "1 .heic file in a2/train/cat: convert to PNG",
    ]


def test_a_site_of_its_own_counts_them_too(root: Path) -> None:
    touch(root, "a/1.png", "a/cat/1.heic")
    assert [str(item) for item in list_site_folder(root / "a", "a").unused] == told(root)


def test_a_name_that_is_not_utf8_can_be_told(root: Path) -> None:
    touch(root, os.fsdecode(b"a/cat/\xff.heic"), os.fsdecode(b"c\xff/1.\xe9"))
    for line in told(root):
        line.encode()


def test_the_check_tells_all_of_them_in_print_and_in_json(root: Path, fedcir: Fedcir) -> None:
    touch(root, "a/cat/1.heic", "b/1.png", "notes.txt", *(f"a/dog/x.kind{i:02}" for i in range(15)))
    output = fedcir("data", "check", "folders", "--data-root", root)
    assert output.code == 0
    assert "warning: not used: 1 image directly in b: move into a class folder\n" in output.out
    assert "warning: not used: 1 .heic file in a/cat: convert to PNG\n" in output.out
    assert "note: not used: 1 .txt file in the data root\n" in output.out
    assert "note: not used: 4 more (--json lists all)\n" in output.out
    result = json.loads(fedcir("data", "check", "folders", "--data-root", root, "--json").out)["unused"]
    assert len(result) == 18
    assert result[0] == {"place": "b", "kind": "image", "files": 1, "advice": "move into a class folder"}


def test_a_run_says_it_in_one_line(root: Path, fedcir: Fedcir, tmp_path: Path) -> None:
    touch(root, *(f"{path}/1.heic" for path in ("a/cat", "a/dog", "b/cat")), "b/1.png", "b/2.png", "x.md", "y.txt")
    small = "--image-size 8 --rounds 1 --local-steps 1 --algorithm fedavg --device cpu --set model.width=2 --no-report"
    output = fedcir("run", "--dataset", "folders", "--data-root", root, *small.split(), "-o", tmp_path / "run")
    assert output.code == 0
    assert output.err.startswith(
        "note: files that are not used: 3 .heic files in a/cat and 2 other folders (convert to PNG), "
        "2 images directly in b (move into a class folder), 1 .md file in the data root, and 1 other kind; "
        "`fedcir data check` lists them\n"
    )


def test_nothing_is_said_where_everything_is_used(root: Path) -> None:
    assert (told(root), notes_on_unused(list_folder_images(root).unused)) == ([], ())


def test_a_dataset_of_other_files_alone_is_refused_with_what_to_do(tmp_path: Path, fedcir: Fedcir) -> None:
    output = fedcir("data", "check", "folders", "--data-root", touch(tmp_path, "a/cat/1.heic", "a/cat/2.heic"))
    assert (output.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert output.err.endswith("; it holds 2 .heic files in a/cat: convert to PNG\n")


def test_lists_that_are_read_are_not_called_unused(tmp_path: Path, fedcir: Fedcir) -> None:
    """PACS with its official lists beside the images."""
    rng = np.random.default_rng(0)
    for domain in PACS.counts:
        for part, count in (("train", 3), ("crossval", 1)):
            lines = []
            for number, label in enumerate(PACS.classes):
                for i in range(count):
                    name = f"{domain}/{label}/{part}{i}.png"
                    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / name)
                    lines.append(f"{name} {number + 1}\n")
            (tmp_path / f"{domain}_{part}_kfold.txt").write_text("".join(lines))
    touch(tmp_path, "photo/dog/1.heic")
    result = json.loads(fedcir("data", "check", "pacs", "--data-root", tmp_path, "--image-size", 8, "--json").out)
    assert [item["kind"] for item in result["unused"]] == [".heic"]
