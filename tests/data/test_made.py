"""The embedded data are made once a machine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedcir.data.cache import clear_cache
from fedcir.data.domains import Domains, Split
from fedcir.data.sources.minidigits import cached_minidigits


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def made(digits: Domains, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the images once for all tests of this file, and count how often they are asked for."""
    calls: list[int] = []

    def make(seed: int = 0) -> Domains:
        calls.append(seed)
        return digits

    monkeypatch.setattr("fedcir.data.sources.minidigits.minidigits", make)
    return calls


def splits(domains: Domains) -> Iterator[Split]:
    return (split for domain in domains for split in (domain.train, domain.test))


def same(one: Domains, other: Domains) -> bool:
    pairs = list(zip(splits(one), splits(other), strict=True))
    equal = [np.array_equal(a.images, b.images) and np.array_equal(a.labels, b.labels) for a, b in pairs]
    return all(equal) and all(list(a.ids) == list(b.ids) for a, b in pairs) and one.names == other.names


def test_what_is_read_again_is_what_was_made(digits: Domains, folder: Path, made: list[int]) -> None:
    first, read = cached_minidigits(), cached_minidigits()
    assert made == [0]
    assert [path.suffix for path in folder.iterdir()] == [".npz"]
    assert same(first, digits)
    assert same(read, digits)
    assert read.classes == digits.classes


@pytest.mark.slow
def test_reading_again_imports_nothing_that_draws() -> None:
    cached_minidigits()
    code = "import sys, fedcir.data.sources.minidigits as m; m.cached_minidigits(); print('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_a_damaged_file_is_made_anew(digits: Domains, folder: Path, made: list[int]) -> None:
    cached_minidigits()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert same(cached_minidigits(), digits)
    assert made == [0, 0]
    assert len(file.read_bytes()) == len(whole)


def test_a_cache_that_cannot_be_written_to_does_no_harm(digits: Domains, folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    assert same(cached_minidigits(), digits)


def test_clearing_the_cache_removes_it(folder: Path) -> None:
    cached_minidigits()
    assert clear_cache() > 0
    assert not list(folder.iterdir())
