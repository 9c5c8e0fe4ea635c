"""PACS and Office-Caltech-10 as they are, where they lie beside the project."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcir.config import DataConfig
from fedcir.data.domains import Domains
from fedcir.data.opening import open_dataset
from fedcir.errors import InputError

REAL = Path(__file__).parents[3] / "shared" / "data"
PACS, LISTS, OFFICE = REAL / "pacs", REAL / "pacs_official_split", REAL / "office_caltech10"
SIZE = 32

pytestmark = pytest.mark.skipif(
    not (PACS.is_dir() and LISTS.is_dir() and OFFICE.is_dir()), reason="no PACS and Office in ../shared/data"
)

COUNTS = {
    "pacs": {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
    "office-caltech-10": {"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
}
CLASSES = {
    "pacs": "dog elephant giraffe guitar horse house person",
    "office-caltech-10": "backpack bike calculator headphones keyboard laptop_computer monitor mouse mug projector",
}
ROOTS = {"pacs": PACS, "office-caltech-10": OFFICE}


def opened(name: str, seed: int = 0, lists: Path | None = None, root: Path | None = None) -> Domains:
    given = None if lists is None else str(lists)
    return open_dataset(DataConfig(name, str(root or ROOTS[name]), lists=given, image_size=SIZE), seed)


@cache
def content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(name: str, domains: Domains, part: str) -> list[str]:
    return [content(ROOTS[name] / item) for domain in domains for item in getattr(domain, part).ids]


@pytest.mark.parametrize("name", ["pacs", "office-caltech-10"])
def test_every_domain_has_its_published_images_and_classes(name: str) -> None:
    domains = opened(name)
    copies = {"amazon": 25, "caltech": 1} if name == "office-caltech-10" else {}
    assert " ".join(domains.classes) == CLASSES[name]
    assert {d.name: len(d.train) + len(d.test) + copies.get(d.name, 0) for d in domains} == COUNTS[name]
    assert domains.image_shape == (SIZE, SIZE, 3)


def test_pacs_with_its_official_lists_has_exactly_the_files_they_name() -> None:
    domains = opened("pacs", lists=LISTS)
    assert [len(domain.train) for domain in domains] == [1840, 2107, 1499, 3531]
    assert [len(domain.test) for domain in domains] == [208, 237, 171, 398]
    for domain in domains:
        for split, part in ((domain.train, "train"), (domain.test, "crossval")):
            lines = (LISTS / f"{domain.name}_{part}_kfold.txt").read_text().split("\n")
            stems = [line.split(" ")[0].rsplit(".", 1)[0] for line in lines if line]
            assert sorted(name.rsplit(".", 1)[0] for name in split.ids) == sorted(stems)
            assert all(
                domains.classes[k] == name.split("/")[1] for k, name in zip(split.labels, split.ids, strict=True)
            )
    assert domains.notes == ()


def test_lists_beside_the_images_are_found(tmp_path: Path) -> None:
    for source in (*PACS.iterdir(), *LISTS.iterdir()):
        (tmp_path / source.name).symlink_to(source)
    assert [len(domain.test) for domain in opened("pacs", root=tmp_path)] == [208, 237, 171, 398]


@pytest.mark.parametrize("name", ["pacs", "office-caltech-10"])
def test_without_lists_a_fifth_of_every_class_is_drawn_by_the_seed(name: str) -> None:
    first, again, other = opened(name, 0), opened(name, 0), opened(name, 1)
    for domain in first:
        assert len(domain.test) == round((len(domain.train) + len(domain.test)) / 5)
        tested = np.bincount(domain.test.labels, minlength=len(first.classes))
        whole = tested + np.bincount(domain.train.labels, minlength=len(first.classes))
        assert (abs(tested - whole / 5) < 1).all()
        assert list(domain.test.ids) == list(again[domain.name].test.ids)
        assert list(domain.test.ids) != list(other[domain.name].test.ids)
    if name == "pacs":
        assert first.notes == ("there are no official lists (data.lists), so the split is drawn at random",)


def test_the_copies_in_office_are_left_out_and_said() -> None:
    domains = opened("office-caltech-10")
    assert sum(len(domain.train) + len(domain.test) for domain in domains) == 2507
    assert domains.notes == ("26 of 2533 files are copies of others and are left out",)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "lists"), [("pacs", None), ("pacs", LISTS), ("office-caltech-10", None)])
def test_no_image_is_in_train_and_in_test_by_its_content(name: str, lists: Path | None, seed: int) -> None:
    domains = opened(name, seed, lists)
    train, test = contents(name, domains, "train"), contents(name, domains, "test")
    assert not set(train) & set(test)
    assert len({*train, *test}) == len(train) + len(test)


@pytest.mark.parametrize("name", ["pacs", "office-caltech-10"])
def test_a_check_finds_the_published_counts(name: str, fedcir: Callable[..., Any]) -> None:
    output = fedcir("data", "check", name, "--data-root", ROOTS[name], "--image-size", SIZE, "--quiet")
    assert output.code == 0
    rows = [line.split() for line in output.out.splitlines()]
    for domain, count in COUNTS[name].items():
        assert [domain, str(count), str(count)] in [row[:3] for row in rows]
    assert "but the published dataset has" not in output.out  # no warning
    copies = "; 26 copies will be left out" if name == "office-caltech-10" else ""
    assert output.out.splitlines()[-1] == f"verdict: ready for training{copies}"


def few(name: str, root: Path) -> Path:
    """Links to five images of each class of each domain."""
    for label in ROOTS[name].glob("*/*"):
        folder = root / label.relative_to(ROOTS[name])
        folder.mkdir(parents=True)
        for image in sorted(label.iterdir())[:5]:
            (folder / image.name).symlink_to(image)
    return root


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("pacs", "photo", None, "lacks the domain 'photo' of pacs"),
        ("pacs", "photo", "photos", "has the domain 'photos', but the domains of pacs are art_painting, cartoon,"),
        ("pacs", None, "webcam/dog", "has the domain 'webcam', but the domains of pacs are"),
        ("pacs", "*/dog", "hound", "has the class 'hound', but the classes of pacs are dog, elephant"),
        ("pacs", "*/dog", None, "lacks the class 'dog' of pacs"),
        ("office-caltech-10", "dslr", None, "lacks the domain 'dslr' of office-caltech-10"),
        ("office-caltech-10", "*/mug", "cup", "has the class 'cup', but the classes of office-caltech-10 are"),
    ],
    ids=["no photo", "photos", "one more", "hound", "no dog", "no dslr", "cup"],
)
def test_a_domain_or_class_that_is_not_as_published_is_refused(
    name: str, old: str | None, new: str | None, message: str, tmp_path: Path, fedcir: Callable[..., Any]
) -> None:
    root = few(name, tmp_path / "data")
    for number, path in enumerate(list(root.glob(old)) if old else ()):
        path.rename(tmp_path / str(number) if new is None else path.with_name(new))
    if old is None:
        (root / str(new)).parent.mkdir()
        (root / "photo/dog").rename(root / str(new))
    with pytest.raises(InputError, match=message):
        opened(name, root=root)
    output = fedcir("data", "check", name, "--data-root", root, "--quiet")
    assert output.code == 2
    assert message in output.err
    assert output.err.count("\n") == 1


def test_office_may_spell_its_backpack_in_two_words(tmp_path: Path) -> None:
    root = few("office-caltech-10", tmp_path)
    for path in root.glob("[ad]*/backpack"):  # amazon and dslr
        path.rename(path.with_name("back_pack"))
    domains = opened("office-caltech-10", root=root)
    assert " ".join(domains.classes) == CLASSES["office-caltech-10"]
    assert all(0 in domain.train.labels for domain in domains)


def test_a_run_on_office_tests_on_the_camera_that_it_holds_out(tmp_path: Path, fedcir: Callable[..., Any]) -> None:
    small = "--rounds 2 --local-steps 2 --device cpu --set local.batch_size=8 --set model.width=2 --quiet"
    arguments = ("--dataset", "office-caltech-10", "--data-root", OFFICE, "--image-size", SIZE, "--hold-out", "dslr")
    output = fedcir("run", *arguments, *small.split(), "--out", tmp_path / "run")
    assert output.code == 0, output.err
    rounds = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert len(rounds) == 2
    assert "dslr" in rounds[-1]["accuracy"]
    held = json.loads((tmp_path / "run/manifest.json").read_text())
    assert "dslr/" not in json.dumps(held["clients"])
    assert "webcam/" in json.dumps(held["clients"])


def test_a_table_of_the_images_gives_the_dataset_that_their_folders_give(tmp_path: Path) -> None:
    paths = [path.relative_to(OFFICE) for path in sorted(OFFICE.rglob("*")) if path.suffix == ".jpg"]
    lines = ["path,label,site", *(f"{path},{path.parts[1]},{path.parts[0]}" for path in reversed(paths))]
    (tmp_path / "office.csv").write_text("\n".join(lines), encoding="utf-8")
    settings = {"root": str(OFFICE), "image_size": SIZE}
    table = open_dataset(DataConfig("table", table=str(tmp_path / "office.csv"), **settings), seed=0)  # type: ignore[arg-type]
    folders = open_dataset(DataConfig("folders", **settings), seed=0)  # type: ignore[arg-type]
    assert table.content == folders.content
    for one, other in zip(table, folders, strict=True):
        assert (list(one.train.ids), list(one.test.ids)) == (list(other.train.ids), list(other.test.ids))
