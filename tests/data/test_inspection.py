import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.decoding import MAX_IN_PROCESS
from fedcir.data.inspection import inspect_dataset
from fedcir.data.opening import open_dataset
from fedcir.data.sources.published import OFFICE_CALTECH_10
from fedcir.errors import InputError

Fedcir = Callable[..., tuple[int, str, str]]
HURRY = 300  # seconds until a process that should have ended is given up


def draw(root: Path, *names: str, size: tuple[int, int] = (8, 8)) -> Path:
    """Images of noise, no two the same."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(list(name.encode())).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / name)
    return root


def images(place: str, count: int) -> list[str]:
    return [f"{place}/{number:03}.png" for number in range(count)]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Two domains of two classes, one of them larger, and three classes in all."""
    root = draw(tmp_path / "data", *images("a/cat", 5), *images("a/dog", 7), *images("b/cat", 4))
    return draw(root, *images("b/emu", 3), size=(9, 5))


def line(text: str, start: str) -> str:
    """The only line that starts so."""
    [result] = [each for each in text.splitlines() if each.strip().startswith(start)]
    return result


def test_counts_sizes_and_missing_classes_are_those_of_the_files(good: Path) -> None:
    result = inspect_dataset(DataConfig("folders", str(good)))
    assert result.counts == {"a": {"cat": 5, "dog": 7}, "b": {"cat": 4, "emu": 3}}
    assert result.sizes == Counter({(8, 8): 16, (5, 9): 3})  # width first
    assert result.classes == ["cat", "dog", "emu"]
    assert result.missing == {"a": ["emu"], "b": ["dog"]}
    assert (result.unreadable, result.duplicates, result.off, result.notes, result.obstacle) == ([], [], {}, (), "")


def test_what_is_found_is_printed_with_a_verdict(good: Path, fedcir: Fedcir) -> None:
    code, out, err = fedcir("data", "check", "folders", "--data-root", good)
    assert (code, err) == (0, "")
    assert line(out, "domain ").split() == ["domain", "images", "cat", "dog", "emu"]
    assert line(out, "a ").split() == ["a", "12", "5", "7", "0"]
    assert line(out, "b ").split() == ["b", "7", "4", "0", "3"]
    assert line(out, "sizes") == "sizes: 8x8 (16), 5x9 (3)"
    assert [each for each in out.splitlines() if each.startswith("warning")] == [
        "warning: a has no image of emu",
        "warning: b has no image of dog",
    ]
    assert out.endswith("\nverdict: ready for training\n")


def test_duplicates_are_told_in_groups_and_do_no_harm(good: Path, fedcir: Fedcir) -> None:
    for copy, original in (("a/dog/copy", "a/cat/001"), ("b/cat/copy", "a/cat/001"), ("b/emu/copy", "b/emu/000")):
        shutil.copy(good / f"{original}.png", good / f"{copy}.png")
    code, out, _ = fedcir("data", "check", "folders", "--data-root", good)
    assert code == 0
    assert "warning: copies of one image: a/cat/001.png = a/dog/copy.png = b/cat/copy.png\n" in out
    assert "warning: copies of one image: b/emu/000.png = b/emu/copy.png\n" in out
    assert line(out, "verdict") == "verdict: ready for training; 3 copies will be left out"
    left = sum(len(d.train) + len(d.test) for d in open_dataset(DataConfig("folders", str(good)), seed=0))
    assert left == 19


def test_unreadable_files_are_named_and_are_an_error(good: Path, fedcir: Fedcir) -> None:
    (good / "a/cat/text, too.jpg").write_text("no image")
    (good / "b/emu/cut.png").write_bytes((good / "b/emu/000.png").read_bytes()[:60])
    (good / "b/emu/gone.png").symlink_to("nowhere.png")
    code, out, err = fedcir("data", "check", "folders", "--data-root", good)
    assert code == 2
    assert err == "fedcir: folders cannot be trained on: 3 files are not readable: fix or remove them\n"
    messages = [item for item in out.splitlines() if item.startswith("error: not a readable image: ")]
    assert [item.split(": ")[2] for item in messages] == [
        str(good / name) for name in ("a/cat/text, too.jpg", "b/emu/cut.png", "b/emu/gone.png")
    ]
    assert "verdict" not in out
    assert line(out, "sizes") == "sizes: 8x8 (16), 5x9 (3)"


@pytest.mark.parametrize("command", ["prepare", "show", "partition"])
def test_a_command_that_needs_the_images_names_the_first_unreadable_one(
    command: str, good: Path, fedcir: Fedcir
) -> None:
    for name in ("a/cat/x.png", "b/emu/x.png", "b/emu/y.png"):
        (good / name).touch()
    code, out, err = fedcir("data", command, "folders", "--data-root", good)
    assert (code, out) == (2, "")
    assert err == (
        f"fedcir: {good}/a/cat/x.png is not a readable image: it is not an image of a known format "
        "(and 2 more; `fedcir data check` lists them); fix or remove it\n"
    )


def cat_only(root: Path) -> None:
    for name in ("a/dog", "b/emu"):
        shutil.rmtree(root / name)


def copied(root: Path, source: str, target: str) -> None:
    shutil.rmtree(root / target, ignore_errors=True)
    shutil.copytree(root / source, root / target)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a single class": (cat_only, "only one class, 'cat': a classifier needs two"),
    "a domain of a single class": (lambda root: shutil.rmtree(root / "b/emu"), "domain 'b' holds only the class 'cat'"),
    "a domain of a single image": (lambda root: draw(root, "c/cat/1.png"), "domain 'c'"),
    "a domain with one image a class": (lambda root: draw(root, "c/cat/1.png", "c/dog/1.png"), "domain 'c' has 2"),
    "a domain that is a copy of another": (lambda root: copied(root, "a", "c"), "domain 'c' has 0"),
    "a class that is a copy of another": (lambda root: copied(root, "a/cat", "a/yak"), "class 'yak' has no"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_cannot_be_trained_on_is_said_by_the_check_as_by_the_run(how: str, good: Path, fedcir: Fedcir) -> None:
    spoil, message = SPOILED[how]
    spoil(good)
    with pytest.raises(InputError, match=message):
        open_dataset(DataConfig("folders", str(good), image_size=8), seed=0)
    code, _, err = fedcir("data", "check", "folders", "--data-root", good, "--image-size", 8)
    assert code == 2
    assert err.startswith("fedcir: folders cannot be trained on: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("chosen", ["cat,dog", "cat,yak"], ids=["there", "not there"])
def test_only_the_chosen_classes_are_looked_at(chosen: str, good: Path, fedcir: Fedcir) -> None:
    shutil.rmtree(good / "b")
    (draw(good, *images("a/emu", 3)) / "a/emu/000.png").write_text("no image, and not asked for")
    code, out, err = fedcir("data", "check", "folders", "--data-root", good, "--set", f"data.classes={chosen}")
    if chosen == "cat,dog":
        assert (code, err) == (0, "")
        assert line(out, "a ").split() == ["a", "12", "5", "7"]
    else:
        assert code == 2
        assert f"data.classes: there is no class 'yak' in {good}" in err


def test_counts_that_are_not_the_published_ones_are_warned_of(tmp_path: Path, fedcir: Fedcir) -> None:
    for domain in OFFICE_CALTECH_10.counts:
        for label in OFFICE_CALTECH_10.classes:
            draw(tmp_path, *images(f"{domain}/{label}", 16 if domain == "dslr" else 2))
    for number in range(3):
        (tmp_path / f"dslr/mug/{number:03}.png").unlink()
    code, out, _ = fedcir("data", "check", "office-caltech-10", "--data-root", tmp_path, "--image-size", 8)
    assert code == 0
    assert [each for each in out.splitlines() if each.startswith("warning")] == [
        f"warning: {domain} has 20 images, but the published dataset has {count}"
        for domain, count in (("amazon", 958), ("caltech", 1123), ("webcam", 295))
    ]
    assert line(out, "dslr").split()[:3] == ["dslr", "157", "157"]
    shutil.rmtree(tmp_path / "webcam")
    code, out, err = fedcir("data", "check", "office-caltech-10", "--data-root", tmp_path, "--image-size", 8)
    assert code == 2
    assert line(out, "webcam").split()[:3] == ["webcam", "0", "295"]
    assert err == (
        f"fedcir: office-caltech-10 cannot be trained on: {tmp_path} lacks the domain 'webcam' of office-caltech-10\n"
    )


@pytest.mark.parametrize("broken", [False, True])
def test_json_holds_what_is_printed(broken: bool, good: Path, fedcir: Fedcir) -> None:
    shutil.copy(good / "a/cat/001.png", good / "b/cat/ä.png")
    if broken:
        (good / "a/dog/000.png").write_text("no image")
    code, out, err = fedcir("data", "check", "folders", "--data-root", good, "--json")
    result = json.loads(out)
    assert (code, bool(err)) == ((2, True) if broken else (0, False))
    assert result["counts"] == {"a": {"cat": 5, "dog": 7}, "b": {"cat": 5, "emu": 3}}
    assert result["sizes"] == [[8, 8, 16 if broken else 17], [5, 9, 3]]
    assert result["duplicates"] == [["a/cat/001.png", "b/cat/ä.png"]]
    assert result["missing"] == {"a": ["emu"], "b": ["dog"]}
    assert (result["published"], result["notes"]) == ({}, [])
    assert len(result["unreadable"]) == broken
    assert result["obstacle"] == ("1 file is not readable: fix or remove it" if broken else "")
    assert ("ä" in out, result["obstacle"] in err) == (True, True)


def test_long_lists_are_cut_in_print_and_whole_in_json(good: Path, fedcir: Fedcir) -> None:
    for number in range(15):
        (good / f"a/cat/x{number:02}.png").touch()
    _, out, _ = fedcir("data", "check", "folders", "--data-root", good)
    assert sum(each.startswith("error: ") for each in out.splitlines()) == 13
    assert "error: not a readable image: 3 more (--json lists all)\n" in out
    assert len(json.loads(fedcir("data", "check", "folders", "--data-root", good, "--json")[1])["unreadable"]) == 15


def test_names_in_brackets_are_shown_as_they_are(tmp_path: Path, fedcir: Fedcir) -> None:
    draw(tmp_path, *(name for label in ("cat [old]", "[", "[x]") for name in images(f"[b]/{label}", 3)))
    code, out, _ = fedcir("data", "check", "folders", "--data-root", tmp_path)
    assert code == 0
    for name in ("[b]", "cat [old]", "[x]"):
        assert name in out


def test_arrays_and_the_embedded_digits_are_checked_too(data_root: Path, fedcir: Fedcir) -> None:
    code, out, _ = fedcir("data", "check", "arrays", "--data-root", data_root)
    assert code == 0
    assert line(out, "ink").split() == ["ink", "36", "12", "12", "12"]
    assert line(out, "sizes") == "sizes: 8x8 (108)"
    assert fedcir("data", "check", "minidigits")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "prepare"])
def test_a_decoding_process_that_is_killed_is_one_line(
    command: str, good: Path, tmp_path: Path, signalling: Callable[..., dict[str, str]]
) -> None:
    """As the kernel does it when memory is short. Each process dies when it opens its first image."""
    draw(good, *images("a/dog", MAX_IN_PROCESS + 1))
    dies = signalling("fedcir.data.decoding", "open", ".png", signal.SIGKILL)
    started = subprocess.Popen(
        [sys.executable, "-m", "fedcir", "data", command, "folders", "--data-root", str(good), "--image-size", "8"],
        env={**dies, "FEDCIR_CACHE": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
    )
    _, err = started.communicate(timeout=HURRY)
    assert started.returncode == 2
    assert err.count("\n") == 1
    assert "a process that decodes images ended with code -9" in err
    assert "cannot write the cache" not in err
