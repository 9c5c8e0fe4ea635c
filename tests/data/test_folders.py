import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.opening import open_dataset
from fedcir.data.sources.folders import list_folder_images
from fedcir.errors import InputError

Fedcir = Callable[..., tuple[int, str, str]]

TREE = ["a/cat/1.png", "a/cat/2.png", "a/dog/1.png", "a/dog/2.png", "b/cat/1.png", "b/cat/2.png"]


def touch(root: Path, *names: str) -> Path:
    """Empty files: a scan opens none."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def names(root: Path) -> list[str]:
    return [item.name for item in list_folder_images(root).pictures.items]


def draw(root: Path, *names: str) -> Path:
    """Images of noise, no two the same."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(list(name.encode())).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / name)
    return root


def test_domain_and_class_are_the_first_two_folders(tmp_path: Path) -> None:
    [item] = list_folder_images(touch(tmp_path, "hospital/tumour/2021/left/7.png")).pictures.items
    assert item == ("hospital/tumour/2021/left/7.png", "hospital", "tumour", None, None)


def test_the_order_is_that_of_the_names_whenever_they_were_made(tmp_path: Path) -> None:
    shuffled = random.Random(1).sample(TREE, len(TREE))
    assert shuffled != TREE
    assert names(touch(tmp_path / "1", *TREE)) == names(touch(tmp_path / "2", *shuffled)) == TREE


@pytest.mark.parametrize("name", ["ä é 猫 🐈/kočka/Ω.png", "a b/c d/e f.png", "a,b/c,d/e,f.png", "a'\"b/$c/#%.png"])
def test_unusual_names_are_names(name: str, tmp_path: Path) -> None:
    [item] = list_folder_images(touch(tmp_path, name)).pictures.items
    assert (item.name, item.domain, item.label) == (name, *name.split("/")[:2])


@pytest.mark.parametrize("ending", ["jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "JPG", "Png", "TIFF"])
def test_endings_of_images_count_in_any_case(ending: str, tmp_path: Path) -> None:
    assert names(touch(tmp_path, f"a/cat/1.{ending}")) == [f"a/cat/1.{ending}"]


def test_what_is_hidden_or_no_image_is_passed_over(tmp_path: Path) -> None:
    others = ["a/cat/.1.png", "a/cat/._1.png", "a/cat/.trash/1.png", "a/.git/1.png", ".cache/cat/1.png"]
    others += ["a/cat/Thumbs.db", "a/cat/labels.csv", "a/cat/png", "a/readme.png.txt", "LICENSE", "stray.png"]
    assert names(touch(tmp_path, *TREE, *others, "a/stray.png")) == TREE


def test_a_folder_named_like_an_image_is_a_folder(tmp_path: Path) -> None:
    assert names(touch(tmp_path, "a/cat/x.png/1.png")) == ["a/cat/x.png/1.png"]


def test_links_to_files_classes_and_domains_are_followed(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere", "1.png", "deep/2.png", "cat/3.png")
    root = touch(tmp_path / "root", "a/cat/0.png")
    (root / "a/cat/link.png").symlink_to(tmp_path / "elsewhere/1.png")
    (root / "a/dog").symlink_to(tmp_path / "elsewhere/deep")
    (root / "b").symlink_to(tmp_path / "elsewhere")
    assert names(root) == ["a/cat/0.png", "a/cat/link.png", "a/dog/2.png", "b/cat/3.png", "b/deep/2.png"]


@pytest.mark.parametrize(
    ("link", "target"),
    [("a/cat/loop", "."), ("a/cat/x/loop", ".."), ("a/cat/loop", ".."), ("a/cat/loop", "../.."), ("a/loop", "."),
     ("a/loop", ".."), ("loop", ".")],
)  # fmt: skip
def test_a_link_back_to_a_folder_above_is_not_followed(link: str, target: str, tmp_path: Path) -> None:
    touch(tmp_path, *TREE)
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(target)
    assert names(tmp_path) == TREE


def test_a_link_to_itself_is_not_followed(tmp_path: Path) -> None:
    touch(tmp_path, *TREE)
    for path in ("self", "a/self", "a/cat/self"):
        (tmp_path / path).symlink_to("self")
    assert names(tmp_path) == TREE


def test_a_class_of_one_domain_only_is_a_class(tmp_path: Path) -> None:
    draw(tmp_path, *(f"{path}/{i}.png" for path in ("a/cat", "a/dog", "b/cat", "b/emu") for i in range(5)))
    domains = open_dataset(DataConfig("folders", str(tmp_path), image_size=8), seed=0)
    assert domains.classes == ("cat", "dog", "emu")
    assert [np.bincount(domain.train.labels, minlength=3).tolist() for domain in domains] == [[4, 4, 0], [4, 0, 4]]


def test_pixels_labels_and_names_stay_together(tmp_path: Path) -> None:
    root = draw(tmp_path, *(f"{path}/ü {i},.PNG" for path in ("a b/cat", "a b/dog") for i in range(5)))
    [domain] = open_dataset(DataConfig("folders", str(root), image_size=8), seed=0)
    for split, count in ((domain.train, 8), (domain.test, 2)):
        assert len(split) == count
        for row, name in enumerate(split.ids):
            assert np.array_equal(split.pixels([row])[0], np.asarray(Image.open(root / name)))
            assert split.labels[row] == ("/dog/" in name)


def test_an_empty_class_folder_changes_nothing(tmp_path: Path) -> None:
    (touch(tmp_path, *TREE) / "a/emu").mkdir()
    assert names(tmp_path) == TREE


def test_a_domain_without_a_usable_image_is_said(tmp_path: Path, fedcir: Fedcir) -> None:
    """A site whose images lie one level too high, or are of another kind, must not be lost in silence."""
    draw(tmp_path, *(f"a/{label}/{i}.png" for label in ("cat", "dog") for i in range(5)), "b/1.png")
    touch(tmp_path, "c/cat/1.heic")
    code, out, err = fedcir("data", "check", "folders", "--data-root", tmp_path, "--image-size", 8)
    assert code in (0, 2)
    message = (out + err).replace(str(tmp_path), "")
    assert "b" in [word.strip("'\",:;") for word in message.split()]
    assert "c" in [word.strip("'\",:;") for word in message.split()]


TOO_HIGH = "holds images as {}; it should hold <domain>/<class>/<image>: put the classes of each domain"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["cat/1.png", "dog/1.png"], TOO_HIGH.format("<class>/<image>, such as cat/1.png")),
        (["1.png", "2.png"], TOO_HIGH.format("<image>, such as 1.png")),
        ([], "holds no images; it should hold <domain>/<class>/<image>"),
        (["a/cat/1.txt", "a/dog/.2.png"], "holds no images; it should hold <domain>/<class>/<image>"),
    ],
    ids=["one level too high", "two levels too high", "nothing", "no image"],
)
def test_a_folder_of_another_shape_is_said_in_one_line(
    files: list[str], message: str, tmp_path: Path, fedcir: Fedcir
) -> None:
    touch(tmp_path, *files)
    code, out, err = fedcir("data", "check", "folders", "--data-root", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(f"fedcir: --data-root: {tmp_path} {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("place", [b"a/cat/\xff\xe9.png", b"a/\xff\xe9/1.png", b"\xff\xe9/cat/1.png"])
def test_a_name_that_is_not_utf8_is_refused_in_one_line(place: bytes, tmp_path: Path, fedcir: Fedcir) -> None:
    touch(tmp_path, *TREE, os.fsdecode(place))
    code, out, err = fedcir("data", "check", "folders", "--data-root", tmp_path)
    assert (code, out) == (2, "")
    assert err == f"fedcir: the name of {os.fsencode(tmp_path) + b'/' + place!r} is not UTF-8: rename it\n"


def test_a_root_whose_name_is_not_utf8_works(tmp_path: Path, fedcir: Fedcir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "cache"))
    root = tmp_path / os.fsdecode(b"\xff\xe9")
    draw(root, *(f"a/{label}/{i}.png" for label in ("cat", "dog") for i in range(5)))
    assert fedcir("data", "prepare", "folders", "--data-root", root, "--image-size", 8)[0] == 0
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")  # as a terminal has it, while pytest's prints anything
    command = [sys.executable, "-m", "fedcir", "data", "cache"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    draw(tmp_path, *TREE)
    (tmp_path / "a/cat/3.png").symlink_to("nowhere.png")
    with pytest.raises(InputError, match=r"a/cat/3\.png is missing, or a broken link"):
        open_dataset(DataConfig("folders", str(tmp_path)), seed=0)


def test_arrays_taken_for_folders_are_pointed_to_their_dataset(data_root: Path, fedcir: Fedcir) -> None:
    output = fedcir("data", "check", "folders", "--data-root", data_root)
    assert (output.code, output.out) == (2, "")
    assert output.err.endswith("<domain>/<class>/<image>; use the dataset arrays for its .npz files\n")
