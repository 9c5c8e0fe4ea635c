import hashlib
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.cache import PreparedImages
from fedcir.data.domains import Domains, Split
from fedcir.data.opening import open_dataset
from fedcir.data.sources.source import ImageRecord, Part
from fedcir.data.splits import drop_duplicates, split_items, split_validation
from fedcir.errors import InputError


def items(domain: str = "a", part: Part | None = None, **counts: int) -> list[ImageRecord]:
    return [
        ImageRecord(f"{domain}/{label}/{i:03}", domain, label, part)
        for label, count in counts.items()
        for i in range(count)
    ]


def split(
    some: Sequence[ImageRecord], *, fraction: float = 0.2, seed: int = 0, contents: Sequence[int] | None = None
) -> Domains:
    """The dataset of these items; two of them are the same file where their contents are the same number."""
    numbers = np.arange(len(some), dtype=np.int64) if contents is None else np.array(contents, dtype=np.int64)
    digests = np.frombuffer(b"".join(b"\0" * 8 + int(n).to_bytes(8, "big") for n in numbers), dtype="V16")
    images = np.broadcast_to(numbers[:, None, None, None], (len(some), 1, 1, 3)).astype(np.uint8)
    return split_items("made", some, PreparedImages(images, digests, "content"), fraction, seed)


def counts(part: Split, classes: int) -> list[int]:
    return np.bincount(part.labels, minlength=classes).tolist()


@pytest.mark.parametrize(
    ("images", "fraction", "test"),
    [
        ((10, 5), 0.2, [2, 1]),
        ((7, 3), 0.3, [2, 1]),  # 2.1 and 0.9
        ((60, 30, 10), 0.1, [6, 3, 1]),
        ((8, 8), 0.2, [2, 1]),  # 3 in all; of equal fractions the first class is rounded up
        ((4, 4), 0.01, [1, 0]),  # at least one
        ((3, 1), 0.67, [2, 0]),  # a class with one image stays in training
        ((1, 9), 0.9, [0, 8]),
        ((2, 2), 0.99, [1, 1]),  # and of no class all are taken
    ],
)
def test_every_class_is_tested_on_in_its_share(images: tuple[int, ...], fraction: float, test: list[int]) -> None:
    [domain] = split(items(**dict(zip("abc", images, strict=False))), fraction=fraction)
    assert counts(domain.test, len(images)) == test
    assert counts(domain.train, len(images)) == [all - held for all, held in zip(images, test, strict=True)]


@pytest.mark.parametrize("seed", range(10))
def test_no_class_loses_all_its_training_images(seed: int) -> None:
    rng = np.random.default_rng(seed)
    some = items(**{f"c{label}": int(rng.integers(1, 9)) for label in range(6)})
    domain = split(some, fraction=rng.uniform(0.05, 0.95), seed=seed)["a"]
    assert set(domain.train.labels.tolist()) == set(range(6))
    assert sorted([*domain.train.ids, *domain.test.ids]) == [item.name for item in some]
    assert len(domain.test) >= 1


def test_the_split_is_drawn_by_the_seed_and_the_domain_alone() -> None:
    first, second = items(cat=20, dog=20), items("b", cat=20, dog=20)

    def tested(domains: Domains, name: str) -> list[str]:
        return [item.partition("/")[2] for item in domains[name].test.ids]

    whole = split([*first, *second])
    assert tested(whole, "a") == tested(split([*first, *second]), "a") == tested(split(first), "a")
    assert tested(whole, "a") != tested(split(first, seed=1), "a")
    assert tested(whole, "a") != tested(whole, "b")


def test_images_keep_their_pixels_and_labels_in_both_parts() -> None:
    some = items(dog=5, cat=6)
    domains = split(some, fraction=0.4)
    assert domains.classes == ("cat", "dog")
    for part in (domains["a"].train, domains["a"].test):
        rows = [[item.name for item in some].index(name) for name in part.ids]
        assert part.pixels(range(len(part)))[:, 0, 0, 0].tolist() == rows
        assert [domains.classes[label] for label in part.labels] == [some[row].label for row in rows]


def test_groups_are_never_divided() -> None:
    """Ten bursts of three images: a fifth of them is two bursts."""
    some = [item._replace(group=f"burst {i % 10}") for i, item in enumerate(items(cat=30))]
    some += [item._replace(group=f"burst {10 + i // 4}") for i, item in enumerate(items(dog=40))]
    [domain] = split(some)
    group = {item.name: item.group for item in some}
    train, test = ({group[name] for name in part.ids} for part in (domain.train, domain.test))
    assert not train & test
    assert (len(train), len(test)) == (16, 4)
    assert counts(domain.test, 2) == [6, 8]


def test_images_without_a_group_are_groups_of_one() -> None:
    some = [item._replace(group="burst") if i < 4 else item for i, item in enumerate(items(cat=10, dog=10))]
    assert split(some)["a"].test.ids != split(items(cat=10, dog=10))["a"].test.ids
    assert sum(map(len, (split(some)["a"].train, split(some)["a"].test))) == 20


def test_a_class_within_a_single_group_stays_in_training() -> None:
    """The only two dogs are in a burst that begins with a cat."""
    some = [item._replace(group=f"burst {i}") for i, item in enumerate(items(cat=6))]
    some += [item._replace(group="burst 0") for item in items(dog=2)]
    trained = [counts(split(some, seed=seed, fraction=0.5)["a"].train, 2)[1] for seed in range(8)]
    assert trained == [2] * 8


ORDER = [*items(cat=4, dog=4), *items("b", cat=4, dog=4)]  # rows 0-3, 4-7, 8-11, 12-15


@pytest.mark.parametrize(
    ("one", "other"), [(0, 1), (1, 6), (2, 9), (7, 12)], ids=["class", "classes", "domains", "both"]
)
def test_of_equal_files_the_first_stays(one: int, other: int) -> None:
    contents = list(range(16))
    contents[other] = one
    domains = split(ORDER, contents=contents)
    kept = {name for domain in domains for part in (domain.train, domain.test) for name in part.ids}
    assert kept == {item.name for row, item in enumerate(ORDER) if row != other}
    assert domains.notes[0] == "1 of 16 files are copies of others and are left out"


def test_duplicates_do_not_count_in_the_shares() -> None:
    """Of 100 files ten are different, and a fifth of these is two."""
    [domain] = split(items(cat=95, dog=5), contents=[i // 19 for i in range(95)] + list(range(5, 10)))
    assert (len(domain.train), len(domain.test)) == (8, 2)
    assert counts(domain.test, 2) == [1, 1]


@pytest.mark.parametrize("other", ["a", "b"], ids=["one domain", "two domains"])
def test_of_equal_files_the_one_that_a_list_tests_on_stays(other: str) -> None:
    some = [*items(part="train", cat=5, dog=5), *items(other, part="test", emu=4)]
    if other == "b":
        some += [*items("a", part="test", yak=2), *items("b", part="train", yak=2)]
    contents = list(range(len(some)))
    contents[3] = contents[11] = 12  # a training image of a, and two test images
    domains = split(some, contents=contents)
    assert some[3].name not in domains["a"].train.ids
    assert some[11].name in domains[other].test.ids
    assert some[12].name not in domains[other].test.ids
    digests = np.array(contents).view("V8")
    assert drop_duplicates(some, digests).tolist() == [row for row in range(len(some)) if row not in (3, 12)]


def test_a_list_wins_over_the_fraction() -> None:
    some = [*items(part="train", cat=3), *items(part="test", dog=9)]
    [domain] = split(some, fraction=0.1)
    assert set(domain.test.ids) == {item.name for item in some if item.part == "test"}


@pytest.mark.parametrize(
    ("few", "contents", "message"),
    [
        (items("b", cat=1), [16], 1),
        (items("b", cat=1, dog=1, emu=1), [16, 17, 18], 3),
        (items("b", cat=3), [16, 16, 16], 1),
        (items("b", cat=2, dog=1), [0, 1, 2], 0),
    ],
    ids=["one image", "one image a class", "one image thrice", "another domain's"],
)
def test_a_domain_with_too_few_images_is_refused(few: list[ImageRecord], contents: list[int], message: int) -> None:
    with pytest.raises(
        InputError, match=rf"^domain 'b' has {message} different images?, too few to train and to test on: "
    ):
        split([*items(cat=8, dog=8), *few], contents=[*range(16), *contents])


def write(root: Path) -> Path:
    """Noise of two domains and two classes, and every third image once more under another name, class and domain."""
    rng = np.random.default_rng(0)
    places = [f"{domain}/{label}" for domain in "ab" for label in ("cat", "dog")]
    for folder in places:
        (root / folder).mkdir(parents=True)
    for number in range(80):
        path = root / places[number % 4] / f"{number}.png"
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
        if number % 3 == 0:
            shutil.copy(path, root / places[(number + 1 + number // 4) % 4] / f"copy of {number}.png")
    return root


def hashes(part: Split | None) -> Counter[str]:
    assert part is not None
    return Counter(hashlib.sha256(image.tobytes()).hexdigest() for image in part.pixels(range(len(part))))


@pytest.mark.parametrize("seed", range(3))
def test_no_content_is_in_two_parts_of_a_dataset_of_files(seed: int, tmp_path: Path) -> None:
    root = str(write(tmp_path))
    plain = open_dataset(DataConfig("folders", root, image_size=8), seed)
    aside = open_dataset(DataConfig("folders", root, image_size=8, val_fraction=0.25), seed)
    assert plain.notes[0] == "27 of 107 files are copies of others and are left out"
    parts = [part for domain in aside for part in (domain.train, domain.validation, domain.test)]
    everything = sum(map(hashes, parts), Counter())
    assert len(everything) == 80
    assert set(everything.values()) == {1}
    for domain, same in zip(aside, plain, strict=True):
        assert list(domain.test.ids) == list(same.test.ids)
        assert domain.validation is not None
        assert sorted([*domain.train.ids, *domain.validation.ids]) == sorted(same.train.ids)


def test_validation_takes_its_share_of_every_class_but_never_the_last() -> None:
    domain = split(items(cat=20, dog=10, emu=1), fraction=0.2)["a"]  # 16, 8 and 1 are trained on
    aside = split_validation(domain, 0.25, seed=0)
    assert aside.validation is not None
    assert counts(aside.validation, 3) == [4, 2, 0]
    assert counts(aside.train, 3) == [12, 6, 1]
    assert list(split_validation(domain, 0.25, seed=0).validation.ids) == list(aside.validation.ids)
    assert list(split_validation(domain, 0.25, seed=1).validation.ids) != list(aside.validation.ids)


def test_a_validation_set_of_nothing_is_refused() -> None:
    domain = split(items(cat=2, dog=1), fraction=0.3)["a"]
    with pytest.raises(InputError, match=r"data\.val_fraction=0\.1: no class of domain 'a' has an image to spare"):
        split_validation(domain, 0.1, seed=0)
