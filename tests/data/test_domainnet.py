"""DomainNet in its published layout, with images of a few pixels."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.domains import Domains
from fedcir.data.opening import open_dataset
from fedcir.data.sources.published import TEN_CLASSES
from fedcir.errors import InputError

SIX = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
NUMBERS = {name: 23 * (i + 1) for i, name in enumerate((*TEN_CLASSES, "airplane", "t-shirt"))}


def picture(path: Path, number: int) -> None:
    """A small image that differs from all others in its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    red, rest = divmod(number, 256)
    Image.new("RGB", (2, 2), (red, rest, 9)).save(path, format="PNG")


def append(path: Path, *lines: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def tree(root: Path, domains: Sequence[str] = SIX, *, lacking: tuple[str, str] = ("", "")) -> Path:
    """Three training images and one test image of each of twelve classes in each domain, one class lacking in one."""
    count = 0
    for domain in domains:
        for number, label in enumerate(NUMBERS, start=1):
            for i in range(4 if (domain, label) != lacking else 0):
                count += 1
                name = f"{domain}/{label}/{domain}_{number:03d}_{i + 1:06d}.jpg"
                picture(root / name, count)
                append(root / f"{domain}_{'test' if i == 3 else 'train'}.txt", f"{name} {NUMBERS[label]}")
    return root


def opened(root: Path, *classes: str, seed: int = 0) -> Domains:
    return open_dataset(DataConfig("domainnet", str(root), image_size=4, classes=classes or None), seed)


def names(domains: Domains, part: str) -> set[str]:
    return {name for domain in domains for name in getattr(domain, part).ids}


def in_list(root: Path, part: str, labels: Sequence[str] = TEN_CLASSES) -> set[str]:
    lines = "".join(path.read_text(encoding="utf-8") for path in root.glob(f"*_{part}.txt")).splitlines()
    return {line.rpartition(" ")[0] for line in lines if line.split("/")[1] in labels}


def test_the_ten_classes_of_the_field_are_opened_in_six_domains_by_their_official_lists(tmp_path: Path) -> None:
    domains = opened(tree(tmp_path))
    assert domains.names == SIX
    assert domains.classes == TEN_CLASSES
    assert [(len(d.train), len(d.test)) for d in domains] == [(30, 10)] * 6
    for part in ("train", "test"):
        assert names(domains, part) == in_list(tmp_path, part)
    assert domains.notes == ()


def test_the_split_of_the_lists_is_kept_whatever_the_seed(tmp_path: Path) -> None:
    tree(tmp_path, SIX[:2])
    assert names(opened(tmp_path, seed=0), "test") == names(opened(tmp_path, seed=1), "test")


def test_classes_are_chosen_by_name_or_all_are_taken(tmp_path: Path) -> None:
    tree(tmp_path, SIX[:2])
    assert opened(tmp_path, "zebra", "t-shirt").classes == ("t-shirt", "zebra")
    assert opened(tmp_path, "all").classes == tuple(sorted(NUMBERS))


@pytest.mark.parametrize(("classes", "train"), [("bird,zebra", 6), ('["bird", "t-shirt"]', 6), ("all", 36)])
def test_classes_are_chosen_on_the_command_line(
    classes: str, train: int, fedcir: Callable[..., Any], tmp_path: Path
) -> None:
    arguments = ("data", "partition", "domainnet", "--data-root", tree(tmp_path, SIX[:2]), "--image-size", 4)
    output = fedcir(*arguments, "--set", f"data.classes={classes}")
    assert output.code == 0
    assert [line.split()[2] for line in output.out.splitlines() if "clipart" in line] == [str(train)]


def test_a_class_that_no_list_has_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.classes: .*'brid'.*; did you mean 'bird'\?"):
        opened(tree(tmp_path, SIX[:2]), "brid", "zebra")


def test_a_class_that_one_domain_lacks_keeps_its_place_in_all(tmp_path: Path) -> None:
    domains = opened(tree(tmp_path, SIX[:2], lacking=("infograph", "tiger")))
    tiger, zebra = (domains.classes.index(label) for label in ("tiger", "zebra"))
    assert tiger not in {*domains["infograph"].train.labels, *domains["infograph"].test.labels}
    assert tiger in domains["clipart"].train.labels
    for domain in domains:
        result = dict(zip(domain.train.ids, domain.train.labels, strict=True))
        assert all((label == zebra) == ("/zebra/" in name) for name, label in result.items())


def test_domains_that_are_not_there_are_named_and_the_rest_is_opened(
    tmp_path: Path, fedcir: Callable[..., Any]
) -> None:
    tree(tmp_path, ("clipart", "real"))
    domains = opened(tmp_path)
    assert domains.names == ("clipart", "real")
    assert domains.notes == ("infograph, painting, quickdraw, sketch are missing, and left out",)
    output = fedcir("data", "partition", "domainnet", "--data-root", tmp_path, "--image-size", 4)
    assert "infograph, painting, quickdraw, sketch are missing" in output.err


def test_a_folder_without_any_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{tmp_path} holds no <domain>_train\.txt"):
        opened(tmp_path)


def test_a_domain_with_one_list_of_two_is_refused(tmp_path: Path) -> None:
    (tree(tmp_path, SIX[:2]) / "infograph_test.txt").unlink()
    with pytest.raises(InputError, match=r"infograph_test\.txt"):
        opened(tmp_path)


def test_a_listed_file_that_is_missing_is_named_in_one_line(tmp_path: Path, fedcir: Callable[..., Any]) -> None:
    gone = tree(tmp_path, SIX[:2]) / "clipart/bird/clipart_001_000002.jpg"
    gone.unlink()
    output = fedcir("run", "--dataset", "domainnet", "--data-root", tmp_path, "--image-size", 4, "--quiet")
    assert output.code == 2
    assert str(gone) in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("file", ["a, b.jpg", "my own bird 2.jpg", "vögel ✓.jpg"])
def test_a_path_may_hold_commas_and_spaces(file: str, tmp_path: Path) -> None:
    picture(tree(tmp_path, SIX[:2]) / "clipart/bird" / file, 5000)
    append(tmp_path / "clipart_train.txt", f"clipart/bird/{file} 23")
    assert f"clipart/bird/{file}" in opened(tmp_path)["clipart"].train.ids


@pytest.mark.parametrize(
    "line", ["clipart/bird/clipart_001_000001.jpg", "bird/clipart_001_000001.jpg 23", "clipart/bird/x/1.jpg 23", "<p>"]
)
def test_a_line_of_another_form_is_named_by_file_and_number(line: str, tmp_path: Path) -> None:
    append(tree(tmp_path, SIX[:2]) / "clipart_train.txt", line)
    with pytest.raises(InputError, match=r"clipart_train\.txt, line 37\b"):
        opened(tmp_path)


def test_a_list_that_names_files_of_another_domain_is_refused(tmp_path: Path) -> None:
    append(tree(tmp_path, SIX[:2]) / "clipart_train.txt", "infograph/bird/infograph_001_000001.jpg 23")
    with pytest.raises(InputError, match=r"clipart_train\.txt.*'infograph/bird/infograph_001_000001\.jpg'"):
        opened(tmp_path)


def test_a_file_in_both_lists_is_tested_on_and_never_trained_on(tmp_path: Path) -> None:
    shared = "clipart/bird/clipart_001_000004.jpg"
    append(tree(tmp_path, SIX[:2]) / "clipart_train.txt", f"{shared} 23")
    clipart = opened(tmp_path)["clipart"]
    assert shared not in clipart.train.ids
    assert list(clipart.test.ids).count(shared) == 1
    assert (len(clipart.train), len(clipart.test)) == (30, 10)


def test_of_copies_in_both_lists_the_one_for_testing_stays(tmp_path: Path) -> None:
    test = tree(tmp_path, SIX[:2]) / "infograph/bird/infograph_001_000004.jpg"
    (tmp_path / "clipart/bird/clipart_001_000001.jpg").write_bytes(test.read_bytes())
    domains = opened(tmp_path)
    assert (len(domains["clipart"].train), len(domains["infograph"].test)) == (29, 10)
    assert domains.notes[-1] == "1 of 80 files are copies of others and are left out"


def test_a_domain_of_which_the_lists_test_nothing_is_told_from_one_with_too_few_images(tmp_path: Path) -> None:
    (tree(tmp_path, SIX[:2]) / "infograph_test.txt").write_text("")
    with pytest.raises(InputError, match=r"no test image of domain 'infograph'") as refused:
        opened(tmp_path)
    assert "too few" not in str(refused.value)


def test_checking_the_ten_classes_compares_with_no_published_count_but_all_classes_do(
    tmp_path: Path, fedcir: Callable[..., Any]
) -> None:
    arguments = ("data", "check", "domainnet", "--data-root", tree(tmp_path), "--quiet")
    ten, all_of_them = fedcir(*arguments), fedcir(*arguments, "--set", "data.classes=all")
    assert (ten.code, all_of_them.code) == (0, 0)
    assert "published" not in ten.out
    assert "warning: clipart has 48 images, but the published dataset has 48129" in all_of_them.out
