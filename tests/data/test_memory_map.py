"""A prepared dataset is a map of one file: batches are copied out of it, and what was read is let go of."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.cache import PreparedImages, prepare_images
from fedcir.data.decoding import Decoding
from fedcir.data.domains import Split
from fedcir.data.opening import open_dataset
from fedcir.data.sources.folders import list_folder_images

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 2, 6, 9, 9, 3), dtype=np.uint8)
"""By domain, class and number."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for d, domain in enumerate(("art", "photo")):
        for c, label in enumerate(("cat", "dog")):
            (root / domain / label).mkdir(parents=True)
            for n in range(6):
                Image.fromarray(PIXELS[d, c, n]).save(root / domain / label / f"{n}.png")
    return root


@pytest.fixture
def split(tree: Path) -> Split:
    return open_dataset(DataConfig("folders", str(tree), image_size=9), seed=0)["photo"].train


def opened(root: Path) -> PreparedImages:
    return prepare_images("folders", str(root), list_folder_images(root).pictures, Decoding(9))


def test_prepared_images_are_a_map_that_nobody_can_write_to(split: Split) -> None:
    assert isinstance(split.images, np.memmap)
    assert not split.images.flags.writeable


@pytest.mark.parametrize("indices", [[0], [2, 0, 2], [], np.array([1, 0]), np.arange(9)], ids=str)
def test_pixels_are_a_plain_array_of_their_own(split: Split, indices: list[int]) -> None:
    taken = split.pixels(indices)
    assert type(taken) is np.ndarray
    assert taken.shape == (len(indices), 9, 9, 3)
    assert not np.shares_memory(taken, split.images)
    assert taken.flags.writeable
    for image, index in zip(taken, indices, strict=True):
        _, label, number = split.ids[index].removesuffix(".png").split("/")
        assert np.array_equal(image, PIXELS[1, ["cat", "dog"].index(label), int(number)])


def test_a_change_to_pixels_changes_nothing_else(split: Split) -> None:
    before = split.pixels([0])
    split.pixels([0])[:] = 0
    assert np.array_equal(split.pixels([0]), before)


def test_taking_samples_copies_no_image(split: Split) -> None:
    some = split.take([3, 1, 1])
    assert some.images is split.images
    assert some.take([2]).images is split.images
    assert list(some.ids) == [split.ids[3], split.ids[1], split.ids[1]]
    assert some.labels.tolist() == split.labels[[3, 1, 1]].tolist()
    assert np.array_equal(some.take([2, 0]).pixels([0, 1]), split.pixels([1, 3]))


def test_the_splits_of_all_domains_are_rows_of_one_map(tree: Path) -> None:
    domains = open_dataset(DataConfig("folders", str(tree), image_size=9, val_fraction=0.2), seed=0)
    splits = [split for domain in domains for split in (domain.train, domain.test, domain.validation)]
    assert all(split is not None and split.images is splits[0].images for split in splits)
    rows = np.concatenate([split.where for split in splits if split is not None])
    assert np.array_equal(np.sort(rows), np.arange(24))


def test_several_opens_share_one_file(tree: Path) -> None:
    first, second = opened(tree), opened(tree)
    assert first.images.filename == second.images.filename
    inode = Path(first.images.filename).stat().st_ino
    maps = Path("/proc/self/maps")
    if maps.exists():
        mapped = [line.split() for line in maps.read_text().splitlines() if line.endswith(str(first.images.filename))]
        assert len(mapped) >= 2
        assert {(int(words[4]), words[1]) for words in mapped} == {(inode, "r--s")}  # shared, not copied on write


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("order", ["in order", "shuffled", "shuffled, of a view"])
def test_a_process_that_has_read_everything_holds_next_to_nothing_of_it(tmp_path: Path, order: str) -> None:
    """60 MB, read in batches of 1 MB as an epoch does; read without letting go, all of it would be counted."""
    images = np.lib.format.open_memmap(tmp_path / "images.npy", "w+", np.uint8, (1250, 128, 125, 3))
    images[:] = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    images.flush()
    script = (
        "import os, sys\n"
        "import numpy as np\n"
        "from fedcir.data.domains import Split\n"
        "def resident():\n"
        "    with open('/proc/self/statm') as file:\n"
        "        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "images = np.load(sys.argv[1], mmap_mode='r')\n"
        "images = images[..., None][..., 0] if 'view' in sys.argv[2] else images\n"
        "split = Split(images, np.zeros(1250, np.int64), ['name'] * 1250)\n"
        "order = np.arange(1250) if sys.argv[2] == 'in order' else np.random.default_rng(0).permutation(1250)\n"
        "split.pixels(order[:20])\n"
        "before, largest, total = resident(), 0, 0\n"
        "for start in range(0, 1250, 20):\n"
        "    total += int(split.pixels(order[start:start + 20]).sum())\n"
        "    largest = max(largest, resident() - before)\n"
        "assert total == int(split.images.sum(dtype=np.int64))\n"
        "print(largest, resident() - before)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "images.npy"), order]
    message = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    grown, without = map(int, message.split())
    assert grown < 6e6
    assert without > 50e6  # as is seen when the map is read directly
