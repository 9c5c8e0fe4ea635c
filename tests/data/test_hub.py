"""Datasets of the Hugging Face libraries, written here by these libraries themselves."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from fedcir.config import DataConfig
from fedcir.data.domains import Domains
from fedcir.data.opening import open_dataset
from fedcir.errors import InputError
from warm_process import Output

datasets = pytest.importorskip("datasets", reason="the datasets library is not installed (fedcir[hub])")

LABELS, DOMAINS = ("cat", "dog", "emu"), ("photo", "sketch")
COLUMNS = ("image", "label", "domain")
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library copies parquet files into a cache, which must not be the user's."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def png(seed: int) -> bytes:
    made = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (10, 12, 3), dtype=np.uint8)
    Pillow.fromarray(pixels).save(made, format="PNG")
    return made.getvalue()


def rows(count: int = 30, start: int = 0) -> list[Row]:
    """Labels go round within domains that alternate, all images different."""
    return [
        {"image": {"bytes": png(start + i), "path": None}, "label": LABELS[i // 2 % 3], "domain": DOMAINS[i % 2]}
        for i in range(count)
    ]


def table(some: list[Row], names: Sequence[str] = COLUMNS, *, classes: bool = True, numbers: bool = False) -> Any:
    """A dataset of these rows: labels as ClassLabel or strings, domains as strings or whole numbers."""
    label = datasets.ClassLabel(names=list(LABELS)) if classes else datasets.Value("string")
    domain = datasets.Value("int64" if numbers else "string")
    features = dict(zip(names, (datasets.Image(), label, domain), strict=True))
    if numbers:
        some = [{**row, "domain": DOMAINS.index(row["domain"])} for row in some]
    columns = {name: [row[key] for row in some] for name, key in zip(names, COLUMNS, strict=True)}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def opened(root: Path | str, seed: int = 0, **settings: Any) -> Domains:
    return open_dataset(DataConfig("hub", str(root), image_size=8, **settings), seed)


def sizes(domains: Domains) -> dict[str, tuple[int, int]]:
    return {domain.name: (len(domain.train), len(domain.test)) for domain in domains}


@pytest.mark.parametrize("classes", [True, False])
def test_a_saved_dataset_is_opened_with_its_classes_and_domains(classes: bool, tmp_path: Path) -> None:
    table(rows(), classes=classes).save_to_disk(tmp_path / "saved")
    domains = opened(tmp_path / "saved")
    assert domains.classes == LABELS
    assert sizes(domains) == {"photo": (12, 3), "sketch": (12, 3)}
    train = domains["photo"].train
    assert train.labels.tolist() == [int(name.removeprefix("train/")) // 2 % 3 for name in train.ids]


def test_whole_numbers_name_domains(tmp_path: Path) -> None:
    table(rows(), numbers=True).save_to_disk(tmp_path / "saved")
    assert opened(tmp_path / "saved").names == ("0", "1")


def test_a_split_named_test_is_for_testing_whatever_the_seed(tmp_path: Path) -> None:
    whole = {"train": table(rows(24)), "validation": table(rows(6, 100)), "test": table(rows(12, 200))}
    datasets.DatasetDict(whole).save_to_disk(tmp_path / "saved")
    for seed in (0, 1):
        domains = opened(tmp_path / "saved", seed)
        assert sizes(domains) == {"photo": (15, 6), "sketch": (15, 6)}
        assert {name.split("/")[0] for name in domains["photo"].test.ids} == {"test"}


@pytest.mark.parametrize("names", ["{}-00000-of-00001", "data/{}", "default/{}/0000"])
def test_parquet_files_are_opened_by_the_splits_that_the_hub_names_them_after(names: str, tmp_path: Path) -> None:
    for split, some in (("train", rows(24)), ("test", rows(12, 200))):
        path = tmp_path / "cloned" / f"{names.format(split)}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table(some).to_parquet(path)
    domains = opened(tmp_path / "cloned")
    assert domains.classes == LABELS
    assert sizes(domains) == {"photo": (12, 6), "sketch": (12, 6)}
    assert {name.split("/")[0] for name in domains["sketch"].test.ids} == {"test"}


def test_a_single_parquet_file_is_divided(tmp_path: Path) -> None:
    table(rows()).to_parquet(tmp_path / "mine.parquet")
    assert sizes(opened(tmp_path / "mine.parquet")) == {"photo": (12, 3), "sketch": (12, 3)}


def test_the_pixels_are_those_of_folders_with_the_same_images(tmp_path: Path) -> None:
    some = rows()
    for i, row in enumerate(some):
        folder = tmp_path / "folders" / row["domain"] / row["label"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:06d}.png").write_bytes(row["image"]["bytes"])
    table(some).save_to_disk(tmp_path / "saved")
    apart = open_dataset(DataConfig("folders", str(tmp_path / "folders"), image_size=8), seed=0)

    def pixels(domains: Domains) -> dict[str, bytes]:
        parts = [part for domain in domains for part in (domain.train, domain.test)]
        return {Path(n).stem: part.pixels([i]).tobytes() for part in parts for i, n in enumerate(part.ids)}

    assert pixels(opened(tmp_path / "saved")) == pixels(apart)


@pytest.mark.parametrize("kind", ["saved", "train.parquet"])
def test_a_dataset_is_decoded_once_and_again_when_it_has_changed(kind: str, tmp_path: Path) -> None:
    decoded: list[int] = []
    for start, change in ((0, True), (0, False), (1000, True)):
        if change:
            shutil.rmtree(tmp_path / "saved", ignore_errors=True)
            made = table(rows(start=start))
            made.save_to_disk(tmp_path / kind) if kind == "saved" else made.to_parquet(tmp_path / kind)
        config = DataConfig("hub", str(tmp_path / kind), image_size=9)
        open_dataset(config, 0, lambda done, total: decoded.append(done))
    assert decoded == [30, 30]


def test_columns_of_other_names_are_chosen_and_classes_too(tmp_path: Path) -> None:
    table(rows(), ("picture", "animal", "site")).save_to_disk(tmp_path / "saved")
    domains = opened(tmp_path / "saved", columns=("picture", "animal", "site"), classes=("emu", "cat"))
    assert domains.classes == ("cat", "emu")
    assert sizes(domains) == {"photo": (8, 2), "sketch": (8, 2)}


def test_a_missing_column_is_named_with_those_there_are_and_the_remedy(tmp_path: Path, fedcir: Any) -> None:
    table(rows(), ("image", "label", "site")).save_to_disk(tmp_path / "saved")
    output = fedcir("data", "check", "hub", "--data-root", tmp_path / "saved")
    assert (output.code, output.err.count("\n")) == (2, 1)
    assert "has no column 'domain', it has image, label, site: name yours with data.columns=" in output.err
    setting = "data.columns=image,label,site"
    assert fedcir("data", "check", "hub", "--data-root", tmp_path / "saved", "--set", setting).code == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("image", "label"), r"data\.columns must name three columns, for image, label and domain, got 'image, label'"),
        (("label", "image", "domain"), r"the column 'label' of .*saved holds no images"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns: tuple[str, ...], message: str, tmp_path: Path) -> None:
    table(rows()).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=message):
        opened(tmp_path / "saved", columns=columns)


@pytest.mark.parametrize("cell", [b"no image", png(7)[:-60], b"", None], ids=["text", "cut", "no bytes", "nothing"])
def test_a_cell_that_is_no_image_is_named_by_its_row(cell: bytes | None, tmp_path: Path) -> None:
    some = rows()
    some[7]["image"] = None if cell is None else {"bytes": cell, "path": None}
    table(some).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=r"saved/train/000007 is not a readable image: ") as refused:
        opened(tmp_path / "saved")
    assert "No such file" not in str(refused.value)  # there never was one


@pytest.mark.parametrize(("column", "value"), [("label", -1), ("label", None), ("domain", None)])
def test_a_row_without_a_label_or_a_domain_is_refused_and_not_counted_to_another(
    column: str, value: int | None, tmp_path: Path
) -> None:
    some = rows()
    some[7][column] = value  # -1 is the library's way to say that a label is not known
    table(some).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=rf"'{column}'.*\b0*7\b"):
        opened(tmp_path / "saved")


def test_a_domain_that_the_test_split_lacks_is_told_from_one_with_too_few_images(tmp_path: Path) -> None:
    test = [row for row in rows(24, 200) if row["domain"] == "photo"]
    datasets.DatasetDict({"train": table(rows(24)), "test": table(test)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=r"no test image of domain 'sketch'") as refused:
        opened(tmp_path / "saved")
    assert "too few" not in str(refused.value)


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"data\.root: {tmp_path} holds no \.parquet file and no saved dataset"):
        opened(tmp_path)


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, without the user's settings of the library."""
    line = [sys.executable, "-m", "fedcir", *map(str, arguments)]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
    return subprocess.run(line, env={**own, **environment}, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "network", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=["offline", "unreachable"]
)
def test_a_name_that_cannot_be_looked_up_is_said_in_one_line(network: dict[str, str], tmp_path: Path) -> None:
    output = command("data", "prepare", "hub", "--data-root", "nobody/nothing", **network, HF_HOME=str(tmp_path))
    assert output.returncode == 2
    assert output.stderr.startswith("fedcir: cannot open 'nobody/nothing' from the hub: ")
    assert output.stderr.count("\n") == 1


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"cannot open '{tmp_path}/saved'.* local folder or \.parquet file"):
        opened(tmp_path / "saved")


def test_without_the_library_its_installation_is_told(
    monkeypatch: pytest.MonkeyPatch, fedcir: Callable[..., Output]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    output = fedcir("data", "check", "hub", "--data-root", "flwrlabs/pacs")
    assert output.code == 2
    assert output.err == "fedcir: dataset 'hub' needs the datasets library: pip install 'fedcir[hub]'\n"


@pytest.mark.slow
def test_a_run_on_a_saved_dataset_works_and_the_library_says_nothing(tmp_path: Path) -> None:
    table(rows()).save_to_disk(tmp_path / "saved")
    small = "--rounds 2 --local-steps 2 --device cpu --set local.batch_size=8 --set model.width=2 --image-size 8"
    where = ("--dataset", "hub", "--data-root", tmp_path / "saved", "--out", tmp_path / "run", "--quiet")
    output = command("run", *where, *small.split(), HF_HOME=str(tmp_path))
    assert (output.returncode, output.stderr) == (0, "")
    rounds = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert [each["accuracy"].keys() for each in rounds] == [{"photo", "sketch"}] * 2


@pytest.mark.slow
def test_whoever_has_turned_the_librarys_bars_off_hears_nothing_of_it(tmp_path: Path) -> None:
    table(rows()).save_to_disk(tmp_path / "saved")
    output = command("data", "check", "hub", "--data-root", tmp_path / "saved", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    assert output.returncode == 0
    assert all(
        line.startswith("checking images: ") for line in output.stderr.splitlines()
    )  # our own, on a busy machine
