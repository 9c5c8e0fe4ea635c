"""`table`: labels in a CSV file beside any tree of images."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig, PartitionConfig
from fedcir.data.opening import open_dataset, open_site
from fedcir.data.partition import partition_labels
from fedcir.data.sources.table import list_table
from fedcir.errors import InputError

Fedcir = Callable[..., tuple[int, str, str]]

ROWS = [
    (f"{site}/scans/{number:02}.png", ("cat", "dog")[number % 2], site, f"{site}-{number // 4}")
    for site in ("bonn", "ulm")
    for number in range(24)
]


def picture(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(path)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites of 24 images each, four of each patient, all of them different."""
    root = tmp_path_factory.mktemp("tree")
    for value, (path, *_) in enumerate(ROWS):
        picture(root / path, value)
    return root


def write(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


def listed(header: str = "path,label,site,group", rows: list[tuple[str, ...]] = ROWS, by: str = ",") -> str:
    return "\n".join([header, *(by.join(row) for row in rows)]) + "\n"


def config(file: Path, **settings: object) -> DataConfig:
    return DataConfig("table", str(file.parent), table=str(file), image_size=4, **settings)  # type: ignore[arg-type]


@pytest.fixture
def write_table(tree: Path, tmp_path: Path) -> Callable[[str], Callable[[], list[tuple[str, ...]]]]:
    """Reads a table of this text on the images of the tree."""

    def wrote(text: str) -> Callable[[], list[tuple[str, ...]]]:
        file = write(tmp_path / "own.csv", text)
        return lambda: [tuple(item) for item in list_table(tree, DataConfig(table=str(file))).pictures.items]

    return wrote


Wrote = Callable[[str], Callable[[], list[tuple[str, ...]]]]


def test_every_row_is_an_image_of_its_site_label_and_group(write_table: Wrote) -> None:
    items = write_table(listed(rows=ROWS[::-1]))()
    assert items == [(path, site, label, None, group) for path, label, site, group in ROWS]  # whatever their order


@pytest.mark.parametrize("by", [",", ";", "\t"])
def test_a_table_may_be_as_excel_writes_it(by: str, write_table: Wrote) -> None:
    """With a mark at its start, another delimiter, lines that end as Windows has them, and an empty row at the end."""
    text = "\ufeff" + listed(by.join(("path", " label", "site", "group")), by=by) + by * 3 + "\n"
    assert len(write_table(text.replace("\n", "\r\n"))()) == 48


def test_paths_of_windows_spaces_and_quotes_are_understood(tree: Path, write_table: Wrote) -> None:
    rows = [
        '"bonn\\scans\\00.png", cat ,bonn',
        './ulm/scans/../scans/00.png,"cat",ulm',
        f"{tree}/ulm/scans/01.png,dog, ulm",
    ]
    text = "\n".join(["path,label,site", *rows])
    assert write_table(text)() == [
        ("bonn/scans/00.png", "bonn", "cat", None, None),
        ("ulm/scans/00.png", "ulm", "cat", None, None),
        ("ulm/scans/01.png", "ulm", "dog", None, None),
    ]


def test_other_names_of_columns_are_given_in_order(tree: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", listed("file,finding,hospital,patient"))
    assert (
        list_table(tree, DataConfig(table=str(file), columns=("file", "finding", "hospital", "patient")))
        .pictures.items[0]
        .group
        == "bonn-0"
    )
    assert (
        list_table(tree, DataConfig(table=str(file), columns=("file", "finding", "hospital"))).pictures.items[0].group
        is None
    )
    write(file, listed("image,label,domain,group"))  # as the hub calls them
    assert list_table(tree, DataConfig(table=str(file))).pictures.items[0].group == "bonn-0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\n", "has no column 'path'; it has file, label: it needs path, label, site (group and split"),
        ("path,label,site\n", "has no rows"),
        ("", "has no column 'path'; it has none"),
        ("path,label,site\nbonn/scans/00.png,,bonn\n", "line 2 has no label: fill it in, or remove the line"),
        ("path,label,site\nbonn/scans/00.png,cat\n", "line 2 has 2 cells, but there are 3 columns"),
        (
            "path,label,site\nbonn/scans/00.png,cat,bonn\n\nbonn/scans/x.png,cat,bonn\ny.png,cat,bonn\n",
            "line 4 names 'bonn/scans/x.png', but .* holds no such file .and 1 more.: correct the path",
        ),
        ("path,label,site\n../secret.png,cat,bonn\n", "line 2 names '../secret.png', which is not below "),
        ("path,label,site\n/etc/passwd,cat,bonn\n", "line 2 names '/etc/passwd', which is not below "),
        (
            "path,label,site\nulm/scans/00.png,cat,ulm\n./ulm/scans/00.png,dog,ulm\n",
            "lines 2 and 3 both name 'ulm/scans/00.png': remove one of them",
        ),
        (
            "path,label,site,group\nbonn/scans/00.png,cat,bonn,7\nulm/scans/00.png,cat,ulm,7\n",
            "group '7' is at 'bonn' and at 'ulm' .lines 2 and 3.: give it to one site, or name two groups differently",
        ),
        (
            "path,label,site,group,split\nulm/scans/00.png,cat,ulm,7,train\nulm/scans/01.png,cat,ulm,7,Test\n",
            "group '7' is in train and in test of the split .lines 2 and 3.: put it into one",
        ),
        (
            "path,label,site,split\nulm/scans/00.png,cat,ulm,train\nulm/scans/01.png,cat,ulm,\n",
            "line 3 has no split, but other rows of 'ulm' have one",
        ),
        ("path,label,site,split\nulm/scans/00.png,cat,ulm,later\n", "split must be train, validation or test, got 'l"),
        ("path,label,site,label\n", "has two columns 'label': rename one"),
        ('path,label,site\n"ulm,cat\n', "line 2 is not part of a table"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(text: str, message: str, write_table: Wrote) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")) as error:
        write_table(text)()
    assert "\n" not in str(error.value)


def test_a_folder_without_a_table_says_what_to_put_there(tmp_path: Path, fedcir: Fedcir) -> None:
    code, _, err = fedcir("data", "check", "table", "--data-root", tmp_path)
    assert code == 2
    assert err.startswith(f"fedcir: there is no table {tmp_path}/labels.csv: it needs the columns path,")


def test_notes_name_labels_that_differ_in_case_and_images_without_a_row(tree: Path, tmp_path: Path) -> None:
    rows = [("bonn/scans/00.png", "Cat", "bonn"), *(row[:3] for row in ROWS[1:46])]
    file = write(tmp_path / "a.csv", listed("path,label,site", rows))
    assert list_table(tree, DataConfig(table=str(file))).notes == (
        "the labels 'Cat' and 'cat' count as 2 classes: if they are one, spell them alike in a.csv",
        "2 images have no row in a.csv and are left out, such as ulm/scans/22.png",
    )


def patients(names: object) -> set[str]:
    group = {path: patient for path, _, _, patient in ROWS}
    return {group[name] for name in names}  # type: ignore[attr-defined]


def test_no_patient_is_in_two_parts_of_a_dataset(tree: Path) -> None:
    file = write(tree / "labels.csv", listed())
    domains = open_dataset(config(file, val_fraction=0.25), seed=3)
    for domain in domains:
        assert domain.validation is not None
        parts = [patients(part.ids) for part in (domain.train, domain.validation, domain.test)]
        assert [len(part) for part in parts] == [4, 1, 1]  # six patients: a fifth, then a quarter, rounded
        assert len(set.union(*parts)) == 6


@pytest.mark.parametrize("scheme", ["dirichlet", "iid"])
def test_no_patient_is_at_two_clients(scheme: str, tree: Path) -> None:
    domains = open_dataset(config(write(tree / "labels.csv", listed())), seed=0)
    labels = {d.name: d.train.labels for d in domains}
    groups = {d.name: d.train.groups for d in domains if d.train.groups is not None}
    chosen = PartitionConfig(scheme, clients=4)  # type: ignore[arg-type]
    shares = partition_labels(chosen, labels, 0, groups=groups)
    held = [patients(domains[name].train.ids[row] for name in s.rows for row in s.rows[name]) for s in shares]
    assert sum(map(len, held)) == len(set.union(*held)) == 10
    assert sum(len(rows) for s in shares for rows in s.rows.values()) == 40
    with pytest.raises(InputError, match="domain 'bonn' has 5 groups of training images, too few for 6 clients"):
        partition_labels(PartitionConfig("dirichlet", clients=12), labels, 0, groups=groups)


def test_a_site_of_one_patient_cannot_be_divided(tree: Path, tmp_path: Path) -> None:
    rows = [(path, label, site, "p" if site == "ulm" else group) for path, label, site, group in ROWS]
    with pytest.raises(InputError, match="domain 'ulm' has 24 different images in 1 group, too few to train and to"):
        open_dataset(
            DataConfig("table", str(tree), table=str(write(tmp_path / "a.csv", listed(rows=rows))), image_size=4), 0
        )


def test_the_sites_own_split_is_used_as_it_is(tree: Path, tmp_path: Path) -> None:
    marks = ("train", "TRAIN", "validation", "Test")
    rows = [(*row[:3], marks[number // 2 % 4]) for number, row in enumerate(ROWS)]
    file = write(tmp_path / "a.csv", listed("path,label,site,split", rows))
    domains = open_dataset(DataConfig("table", str(tree), table=str(file), image_size=4), 0)
    for domain in domains:
        assert domain.validation is not None
        assert set(domain.test.ids) == {path for path, _, site, mark in rows if mark == "Test" and site == domain.name}
        assert (len(domain.train), len(domain.validation), len(domain.test)) == (12, 6, 6)
    assert domains.notes == (
        "all domains: the rows marked train, val and test are used as the split; the best round is picked on val",
    )


def test_a_site_alone_gets_the_split_that_it_has_among_others(tree: Path, tmp_path: Path) -> None:
    together = open_dataset(config(write(tree / "labels.csv", listed())), seed=5)["ulm"]
    [alone] = open_site(tree, "ulm", DataConfig("folders", image_size=4), seed=5)
    assert list(alone.test.ids) == list(together.test.ids)
    assert list(alone.train.ids) == list(together.train.ids)
    with pytest.raises(InputError, match=r"has no row of the site 'jena', only of bonn, ulm: name the site as in"):
        open_site(tree, "jena", DataConfig("folders", image_size=4), seed=5)


def test_a_site_needs_no_column_of_sites(tree: Path, tmp_path: Path) -> None:
    for name in ("00", "01", "02", "03"):
        picture(tmp_path / f"{name}.png", int(name))
    write(tmp_path / "labels.csv", "path,label\n00.png,cat\n01.png,dog\n02.png,cat\n03.png,dog\n")
    [domain] = open_site(tmp_path, "here", DataConfig("folders", image_size=4, test_fraction=0.5), seed=0)
    assert (domain.name, len(domain.train), len(domain.test)) == ("here", 2, 2)


def test_every_command_takes_a_table(tree: Path, tmp_path: Path, fedcir: Fedcir) -> None:
    file = write(tree / "labels.csv", listed())
    given = ["--data-root", tree, "--image-size", 8]
    assert "verdict: ready for training" in fedcir("data", "check", "table", *given)[1]
    assert fedcir("data", "show", "table", *given, "-o", tmp_path / "sheet.png")[0] == 0
    assert "4 clients" in fedcir("data", "partition", "table", *given, "--clients", 4)[1]
    text = "--rounds 1 --local-steps 1 --batch-size 4 --device cpu --set model.width=2 --no-report --quiet"
    options = [*text.split(), "--algorithm", "fedavg", "--image-size", 8, "-o", tmp_path / "run"]
    code, _, err = fedcir("run", "--dataset", "table", "--set", f"data.table={file}", *options)
    assert (code, err) == (0, "")
    assert (tmp_path / "run" / "model.safetensors").is_file()
