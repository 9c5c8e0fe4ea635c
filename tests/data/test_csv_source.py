"""`csv`: tables of several sites, their encoding from sums, and what is wrong with a table in one line."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcir.config import Config, DataConfig, ModelConfig, PartitionConfig, PrivacyConfig
from fedcir.data.encoding import (
    ColumnSummary,
    TableEncoding,
    merge_columns,
    read_encoding,
    sum_columns,
    sum_exactly,
)
from fedcir.data.federation import open_federation
from fedcir.data.opening import open_dataset
from fedcir.data.sources.csv import parse_number
from fedcir.errors import InputError

ROWS_A = "age,sex,city,ill\n" + "".join(f"{30 + n},{n % 2},rome,{n % 3 == 0:d}\n" for n in range(12))
ROWS_B = "sex,age,city,ill\n" + "".join(f"{n % 2},{50 + n},{'oslo' if n % 2 else ''},{n % 2}\n" for n in range(10))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.csv").write_text(ROWS_A)
    (tmp_path / "b.csv").write_text(ROWS_B)
    return tmp_path


def make_config(root: Path, model: str = "mlp", **data: object) -> Config:
    values = {"target": "ill", "categorical": ("sex",), **data}
    return Config(data=DataConfig("csv", str(root), **values), model=ModelConfig(model))  # type: ignore[arg-type]


def test_features_are_scaled_numbers_and_a_column_for_each_category_of_any_site(folder: Path) -> None:
    federation = open_federation(make_config(folder))
    assert federation.card["shape"] == [6]
    encoding = read_encoding(federation.card["table"])
    assert encoding.features == ("age", "city=oslo", "city=rome", "city is missing", "sex=0", "sex=1")
    domains, _ = federation.dataset_and_partition or pytest.fail("no data")
    rows = np.concatenate([domain.train.pixels(np.arange(len(domain.train))) for domain in domains])
    assert rows.dtype == np.float32
    assert rows[:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert rows[:, 0].std() == pytest.approx(1, abs=1e-6)
    assert (rows[:, 1:4].sum(1) == 1).all()
    assert (rows[:, 4:].sum(1) == 1).all()


def test_mean_and_spread_are_those_of_training_rows(folder: Path) -> None:
    (age, *_) = read_encoding(open_federation(make_config(folder)).card["table"]).columns
    raw = open_dataset(make_config(folder).data, seed=0)
    ages = np.concatenate([domain.train.pixels(np.arange(len(domain.train)))[:, 0] for domain in raw])
    assert age.mean == pytest.approx(ages.mean(), rel=1e-15)
    assert age.spread == pytest.approx(ages.std(), rel=1e-15)


def test_sums_are_exact_and_do_not_depend_on_the_order_or_on_who_holds_which_rows() -> None:
    values = np.random.default_rng(0).normal(1e9, 1e-3, 1000)
    column = (ColumnSummary("x", "number"),)
    whole = sum_columns(column, values[:, None])
    (shuffled,) = sum_columns(column, values[::-1, None])
    parts = {name: sum_columns(column, part[:, None]) for name, part in zip("ab", np.split(values, [123]), strict=True)}
    assert whole == merge_columns(parts) == (shuffled,)
    assert sum_exactly(np.array([0.1, 0.2, 0.3]))[0] == Fraction(0.1) + Fraction(0.2) + Fraction(0.3)
    assert whole[0].spread == pytest.approx(np.std(values - 1e9), rel=1e-9)  # float64 sums of squares would give 0


def test_a_missing_number_becomes_the_mean_and_is_marked() -> None:
    columns = (ColumnSummary("x", "number", has_missing=True),)
    values = np.array([[1.0], [3.0], [np.nan]])
    encoding = TableEncoding.fit(sum_columns(columns, values), "federation")
    assert encoding.encode(columns, values, "here").tolist() == [[-1, 0], [1, 0], [0, 1]]


def test_each_site_can_be_scaled_by_its_own_rows_and_then_no_sum_is_in_the_card(folder: Path) -> None:
    federation = open_federation(make_config(folder, scale="client"))
    domains, _ = federation.dataset_and_partition or pytest.fail("no data")
    for domain in domains:
        assert domain.train.pixels(np.arange(len(domain.train)))[:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert {(column["mean"], column["spread"]) for column in federation.card["table"]["columns"]} == {(0.0, 1.0)}


def test_a_held_out_site_adds_nothing_to_the_sums(folder: Path) -> None:
    config = make_config(folder)
    alone = open_federation(Config(config.data, PartitionConfig(hold_out="b"), config.model)).card["table"]["columns"]
    raw = open_dataset(config.data, seed=0)
    assert alone[0]["mean"] == pytest.approx(raw["a"].train.pixels(np.arange(len(raw["a"].train)))[:, 0].mean())
    assert alone[1]["categories"] == ("oslo", "rome")


def test_one_file_with_a_site_column_is_the_same_federation(folder: Path, tmp_path: Path) -> None:
    lines = ["hospital,age,sex,city,ill"]
    for site, text in (("b", ROWS_B), ("a", ROWS_A)):
        header, *rows = (line.split(",") for line in text.splitlines())
        lines += [
            ",".join([site, *(row[header.index(name)] for name in ("age", "sex", "city", "ill"))]) for row in rows
        ]
    file = tmp_path / "all" / "rows.csv"
    file.parent.mkdir()
    file.write_text("\n".join(lines))
    one, two = (open_federation(make_config(root, site="hospital")) for root in (file, folder))
    assert one.card == two.card
    for client, other in zip(one.clients, two.clients, strict=True):
        everything = np.arange(len(client.train or ()))
        batches = [
            c.train.batch(everything, torch.device("cpu"), torch.contiguous_format) for c in (client, other) if c.train
        ]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*batches, strict=True))


def test_rows_of_one_group_stay_on_one_side_of_every_split(tmp_path: Path) -> None:
    for site in "ab":
        rows = [f"{n},{n // 3},{n // 3 % 2}" for n in range(60)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["x,patient,y", *rows]))
    domains = open_dataset(DataConfig("csv", str(tmp_path), target="y", group="patient", val_fraction=0.2), seed=0)
    for domain in domains:
        patients = [{name.pixels([row])[0, 0] // 3 for row in range(len(name))} for name in domain.splits]
        assert len(set.union(*patients)) == sum(map(len, patients)) == 20


def test_a_comparison_makes_two_classes_of_a_column_of_numbers(tmp_path: Path) -> None:
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text("x,num\n" + "".join(f"{n},{n % 4}\n" for n in range(20)))
    domains = open_dataset(DataConfig("csv", str(tmp_path), target="num>0"), seed=0)
    assert domains.classes == ("num<=0", "num>0")
    assert sum(len(split) for split in domains["a"].splits) == 20
    assert sum(int(split.labels.sum()) for split in domains["a"].splits) == 15


def test_equal_rows_are_different_persons(tmp_path: Path) -> None:
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text("x,y\n" + "1,0\n2,1\n" * 10)
    domains = open_dataset(DataConfig("csv", str(tmp_path), target="y"), seed=0)
    assert [len(domain.train) + len(domain.test) for domain in domains] == [20, 20]


def test_rows_with_gaps_can_be_left_out(folder: Path) -> None:
    domains = open_dataset(make_config(folder, missing="drop", classes=("0", "1"), ignore=()).data, 0, to_train=False)
    assert sum(len(split) for split in domains["b"].splits) == 5
    assert "5 of 22 rows have missing cells and are left out (data.missing=drop)" in domains.notes


@pytest.mark.parametrize("cell", ["1_000", "0x10", "inf", "nan", "1e31", "1,5", "", "٣", "1" * 500])
def test_what_python_or_other_languages_write_as_a_number_is_text(cell: str) -> None:
    assert parse_number(cell) is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("age,sex,ill\n1,0,0\n2,1,1\n", "site 'b' has no column 'city', which site 'a' has: add it"),
        ("age,sex,city\n1,0,x\n", "has no column 'ill'; it has age, sex, city"),
        ("age,sex,city,ill\n1,0,x,0\nold,1,x,1\n", "b.csv, line 3: 'age' is 'old', but a number in other rows"),
        ("age,sex,city,ill\nold,0,x,0\nyoung,1,x,1\n", "column 'age' holds numbers at site 'a' and text at site 'b'"),
        ("", "b.csv has no rows"),
        ("age,sex,city,ill\n", "b.csv has no rows"),
        ("age,sex,age,ill\n1,1,1,1\n", "b.csv has two columns 'age': rename one"),
        ("age,sex,,ill\n1,1,1,1\n", "b.csv: column 3 has no name"),
        ("age,sex,city,ill\n1,0,x\n", "b.csv, line 2 has 3 cells, but there are 4 columns"),
        ("age,sex,city,ill\n1,0,x,\n", "b.csv, line 2 has no ill: fill it in"),
        ("age,sex,city,ill\n1,0," + "x" * 200_000 + ",1\n", "b.csv, line 2 is not part of a table: field larger"),
        ('age,sex,city,ill\n1,0,"x,1\n', "b.csv, line 2 is not part of a table"),
        ("age,city,ill\n1,x,1\n", "data.categorical: "),
    ],
)
def test_a_faulty_table_is_an_error_of_one_line(folder: Path, text: str, error: str) -> None:
    (folder / "b.csv").write_text(text)
    with pytest.raises(InputError) as caught:
        open_dataset(make_config(folder).data, seed=0)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf_8_is_refused(folder: Path) -> None:
    (folder / "b.csv").write_bytes("age,sex,city,ill\n1,0,köln,1\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"cannot read .*b\.csv as UTF-8"):
        open_dataset(make_config(folder).data, seed=0)


def test_names_of_persons_are_no_categories(tmp_path: Path) -> None:
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text("x,name,y\n" + "".join(f"{n},p{n},{n % 2}\n" for n in range(30)))
    with pytest.raises(
        InputError, match=r"column 'name' .* has 30 different texts .* leave it out with data.ignore=name"
    ):
        open_dataset(DataConfig("csv", str(tmp_path), target="y"), seed=0)


def test_a_site_column_with_one_site_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("site,x,y\n" + "".join(f"a,{n},{n % 2}\n" for n in range(10)))
    with pytest.raises(InputError, match=r"has one site in its column 'site', 'a'"):
        open_dataset(DataConfig("csv", str(tmp_path / "rows.csv"), target="y"), seed=0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"image_size": 32}, "data.image_size is for images, and csv holds tables: leave it out"),
        ({"channels": 3}, "data.channels is for images"),
        ({"target": None}, "data.target is not set"),
        ({"target": "age,ill"}, "data.target names 2 columns that are not all 0 or 1"),
        ({"ignore": ("weight",)}, "data.ignore: "),
        ({"group": "patient"}, "data.group: "),
    ],
)
def test_settings_that_do_not_fit_a_table_are_refused(folder: Path, change: dict[str, object], error: str) -> None:
    with pytest.raises(InputError) as caught:
        open_dataset(make_config(folder, **change).data, seed=0)
    assert error in str(caught.value)


def test_networks_of_images_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"cnn takes images, but the inputs are of the shape .6.: use mlp or linear"):
        open_federation(make_config(folder, "cnn"))


def test_exact_sums_do_not_go_with_differential_privacy(folder: Path) -> None:
    config = make_config(folder)
    noised = Config(config.data, model=config.model, privacy=PrivacyConfig(clip=1.0, noise=1.0))
    with pytest.raises(
        InputError, match=r"data.scale=federation scales by exact sums .* set data.scale=client, or none"
    ):
        open_federation(noised)


def test_a_category_that_the_encoding_does_not_know_is_named() -> None:
    encoding = TableEncoding.fit((ColumnSummary("city", "category", ("rome",)),), "none")
    columns = (ColumnSummary("city", "category", ("oslo", "rome")),)
    assert encoding.encode(columns, np.array([[1.0]]), "site 'b'").tolist() == [[1.0]]
    with pytest.raises(InputError, match=r"column 'city' of site 'b' has the category 'oslo', which .* it knows rome"):
        encoding.encode(columns, np.array([[0.0]]), "site 'b'")


@pytest.mark.parametrize(
    "sums",
    [
        {"total": "1e9"},
        {"count": 1, "total": "5", "squares": "1"},
        {"squares": "1/0"},
        {"count": 1, "total": "9" * 499, "squares": "9" * 999},  # the mean is no float
        {"count": 3, "total": "1/3", "squares": "1"},  # sums over many sites would have too many digits
    ],
)
def test_impossible_sums_of_a_site_are_refused(sums: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"the sums of column 'x'"):
        ColumnSummary("x", "number", **sums)  # type: ignore[arg-type]


def test_a_site_cannot_claim_categories_of_numbers_or_no_categories() -> None:
    for kind, categories in (("category", ()), ("number", ("a",))):
        with pytest.raises(InputError, match="the categories of column 'x' do not fit its kind"):
            ColumnSummary("x", kind, categories)  # type: ignore[arg-type]


def test_a_missing_group_is_no_group(tmp_path: Path) -> None:
    lines = [f"{number},{number % 2},{'NA' if number else 'p1'}" for number in range(40)]
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text("\n".join(["x,y,patient", *lines]), encoding="utf-8")
    data = DataConfig("csv", str(tmp_path), target="y", group="patient")
    groups = open_dataset(data, 0).domains[0].train.groups
    assert groups is not None
    assert len(set(groups.tolist())) == len(groups)


def test_arrays_of_floats_of_any_shape_reach_the_encoder_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in "ab":
        x, y = rng.normal(size=(40, 3, 5)), np.arange(40) % 2
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x[:10] + 1, y_test=y[:10])
    federation = open_federation(Config(DataConfig("arrays", str(tmp_path)), model=ModelConfig("mlp")))
    assert federation.card == {"classes": ["0", "1"], "shape": [3, 5]}
    train = federation.clients[1].train or pytest.fail("no data")
    x_batch, _ = train.batch(np.array([7]), torch.device("cpu"), torch.contiguous_format)
    assert torch.equal(x_batch[0], torch.from_numpy(x[7].astype(np.float32)))


def test_a_site_may_have_patients_of_one_class_only(folder: Path) -> None:
    (folder / "c.csv").write_text("age,sex,city,ill\n" + "".join(f"{60 + n},1,rome,1\n" for n in range(10)))
    federation = open_federation(make_config(folder))
    assert [client.domain for client in federation.clients] == ["a", "b", "c"]


def test_a_table_that_memory_cannot_hold_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "1,0\n" * 1000, encoding="utf-8")
    monkeypatch.setattr("fedcir.machine.free_memory", lambda: 50_000)
    with pytest.raises(InputError, match=r"the table .*a\.csv needs 0.0 GB of memory"):
        open_dataset(DataConfig("csv", str(tmp_path), target="y"), 0)


def test_a_column_that_one_site_lacks_can_be_ignored(tmp_path: Path) -> None:
    rows = [f"{number},{number % 2},note" for number in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["x,y,remark", *rows]), encoding="utf-8")
    (tmp_path / "b.csv").write_text("\n".join(["x,y", *(row.removesuffix(",note") for row in rows)]), encoding="utf-8")
    with pytest.raises(InputError, match=r"site 'b' has no column 'remark'.* leave it out with data.ignore=remark"):
        open_dataset(DataConfig("csv", str(tmp_path), target="y"), 0)
    domains = open_dataset(DataConfig("csv", str(tmp_path), target="y", ignore=("remark",)), 0)
    assert [column.name for column in domains.columns] == ["x"]


def test_a_group_in_two_parts_of_the_split_is_refused(tmp_path: Path) -> None:
    rows = [f"{number},{number % 2},p{number // 2},{'test' if number > 8 else 'train'}" for number in range(12)]
    for site in "ab":
        (tmp_path / f"{site}.csv").write_text("\n".join(["x,y,patient,part", *rows]), encoding="utf-8")
    data = DataConfig("csv", str(tmp_path), target="y", group="patient", split="part")
    with pytest.raises(InputError, match=r"a\.csv, line 11: the group 'p4' is in train and in test of the split"):
        open_dataset(data, 0)


def test_categories_of_a_site_that_takes_no_part_are_not_in_the_encoding(tmp_path: Path) -> None:
    for site in "abc":
        cities = ["bern", "rome", "" if site == "c" else "bern", "secret" if site == "c" else "rome"]
        rows = [f"{cities[number % 4]},{number},{number // 2 % 2}" for number in range(40)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["city,x,y", *rows]), encoding="utf-8")

    def list_columns(*exclude: str) -> list[dict[str, object]]:
        data, partition = DataConfig("csv", str(tmp_path), target="y"), PartitionConfig(exclude=exclude)
        federation = open_federation(Config(data, partition=partition, model=ModelConfig("linear")))
        columns: list[dict[str, object]] = federation.card["table"]["columns"]
        return columns

    assert [column["categories"] for column in list_columns()] == [("bern", "rome", "secret"), ()]
    without = list_columns("c")
    (tmp_path / "c.csv").unlink()
    assert without == list_columns()
    assert [(column["categories"], column["has_missing"]) for column in without] == [
        (("bern", "rome"), False),
        ((), False),
    ]
