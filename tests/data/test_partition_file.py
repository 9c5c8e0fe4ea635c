"""Who holds what, by a CSV file of paths and clients."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.config import Config
from fedcir.data.federation import open_federation, partition_dataset
from fedcir.runtime.run_folder import RunFolder

Tiny = Callable[..., Config]
Train = Callable[..., Path]
Command = Callable[..., Any]
Write = Callable[..., Path]


def some(domain: str, *numbers: int) -> list[str]:
    """Names of training images, of which each domain has 24; number % 3 is the class."""
    return [f"{domain}/train/{number:06d}" for number in numbers or range(24)]


WHOLE = {"north": some("ink"), "south": some("pen"), "east": some("wax")}
MIXED = {"north": some("ink") + some("pen", 0, 1, 2), "east": some("wax")}
"""Nobody stands for pen, of which three images are trained on."""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(owned: dict[str, Iterable[str]] | str | bytes, name: str = "owners.csv") -> Path:
        path = tmp_path / name
        if isinstance(owned, dict):
            owned = "path,client\n" + "".join(f"{image},{owner}\n" for owner in owned for image in owned[owner])
        path.write_bytes(owned.encode() if isinstance(owned, str) else owned)
        return path

    return write_file


@pytest.fixture
def by_file(tiny: Tiny) -> Callable[..., Config]:
    def make(path: Path, *assignments: str, algorithm: str = "fedavg") -> Config:
        return tiny(algorithm, "partition.scheme=csv", f"partition.file={path}", *assignments)

    return make


def test_clients_come_in_the_order_of_their_first_mention(write: Write, by_file: Tiny) -> None:
    rows = [("pen", 3, "zoo"), ("ink", 0, "b"), ("wax", 2, "zoo"), ("ink", 1, "a"), ("pen", 0, "b")]
    text = "".join(f"{domain}/train/{number:06d},{owner}\n" for domain, number, owner in rows)
    _, shares = partition_dataset(by_file(write("path,client\n" + text)))
    assert [share.name for share in shares[:3]] == ["zoo", "b", "a"]
    assert [{name: rows.tolist() for name, rows in share.rows.items()} for share in shares[:3]] == [
        {"pen": [3], "wax": [2]},
        {"ink": [0], "pen": [0]},
        {"ink": [1]},
    ]


def test_a_client_stands_for_the_domain_it_holds_most_of(write: Write, by_file: Tiny) -> None:
    owned = {
        "a": some("ink", 0, 1) + some("pen", 0, 1, 2) + some("wax", 0),
        "b": some("wax", 5, 6) + some("ink", 5, 6),  # as many of each: the first domain
        "c": some("wax", 7, 8),
    }
    _, shares = partition_dataset(by_file(write(owned)))
    assert [share.domain for share in shares] == ["pen", "ink", "wax"]


def test_a_domain_nobody_stands_for_is_still_tested(write: Write, by_file: Tiny, train: Train, tmp_path: Path) -> None:
    config = by_file(write(MIXED), "server.rounds=1")
    federation = open_federation(config)
    assert [client.domain for client in federation.clients] == ["ink", "wax", "pen"]
    assert list(federation.trainers) == [0, 1]
    assert federation.evaluators == {0: "ink", 1: "wax", 2: "pen"}
    (record,) = RunFolder(train(config, tmp_path / "run")).records()
    assert record.accuracy is not None
    assert record.accuracy.keys() == {"ink", "pen", "wax"}


def test_validation_images_of_a_domain_nobody_stands_for_are_looked_at(
    write: Write, by_file: Tiny, train: Train, tmp_path: Path
) -> None:
    config = by_file(write(MIXED), "server.rounds=1", "data.val_fraction=0.25")
    (record,) = RunFolder(train(config, tmp_path / "run")).records()
    assert record.validation is not None
    assert record.validation.keys() == {"ink", "pen", "wax"}


def test_a_site_that_only_tests_does_not_go_with_batchnorm_of_its_own(
    fedcir: Command, options: list[str], write: Write, tmp_path: Path
) -> None:
    sets = ["partition.scheme=csv", f"partition.file={write(MIXED)}", "model.batchnorm=local"]
    out = tmp_path / "run"
    output = fedcir("run", *options, "-o", out, "--algorithm", "fedavg", *(w for each in sets for w in ("--set", each)))
    assert (output.code, output.err.count("\n")) == (2, 1)
    assert "model.batchnorm=local" in output.err
    assert not out.exists()


def test_rows_that_name_test_images_are_passed_over(write: Write, by_file: Tiny) -> None:
    tests = {owner: [*rows, rows[0].replace("train", "test")] for owner, rows in WHOLE.items()}
    domains, shares = partition_dataset(by_file(write(tests)))
    assert [sum(map(len, share.rows.values())) for share in shares] == [24, 24, 24]
    assert domains.notes == ()


def test_unknown_paths_and_images_without_an_owner_become_notes(fedcir: Command, data_root: Path, write: Write) -> None:
    path = write({"north": [*some("ink", *range(22)), "ink/lost", "ink/gone"], "south": some("pen") + some("wax")})
    notes = (
        f"note: paths in {path} that name no image in use: 2, the first is 'ink/lost'\n"
        f"note: training images that {path} gives to no client: 2, the first is 'ink/train/000022'\n"
    )
    command = ["data", "partition", "arrays", "--data-root", data_root, "--set", "partition.scheme=csv"]
    output = fedcir(*command, "--set", f"partition.file={path}")
    assert (output.code, output.err) == (0, notes)
    assert [line.split()[:3] for line in output.out.splitlines() if "north" in line] == [["north", "ink", "22"]]


def test_notes_are_told_beside_json_too(fedcir: Command, data_root: Path, write: Write) -> None:
    sets = ["--set", "partition.scheme=csv", "--set", f"partition.file={write({**WHOLE, 'east': some('wax', 0, 1)})}"]
    output = fedcir("data", "partition", "arrays", "--data-root", data_root, *sets, "--json")
    assert len(json.loads(output.out)["clients"]) == 3
    assert output.err.startswith("note: training images that ")


@pytest.mark.parametrize("name", ["north [old]", "[/north]"])
def test_a_clients_name_is_shown_as_it_is(fedcir: Command, data_root: Path, write: Write, name: str) -> None:
    sets = ["--set", "partition.scheme=csv", "--set", f"partition.file={write({name: some('ink')})}"]
    assert f" {name} " in fedcir("data", "partition", "arrays", "--data-root", data_root, *sets).out


def test_extra_columns_a_byte_order_mark_and_quoted_commas_are_read(tiny: Tiny, write: Write, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for path in ("ward 1/cat", "ward 1/dog", "ward 2/cat", "ward 2/dog"):
        (tmp_path / "scans" / path).mkdir(parents=True)
        for name in ("a,1.png", 'b"2.png', "c.png", "d.png"):
            Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(tmp_path / "scans" / path / name)
    rows = []
    for image in sorted((tmp_path / "scans").rglob("*.png")):
        name = image.relative_to(tmp_path / "scans").as_posix().replace('"', '""')
        rows.append(f'"{name}",7,x,"Clinic, {name.split("/")[0]}"')
    file = write("\ufeff" + "\r\n".join(["path,age,sex,client", *rows]) + "\r\n")
    settings = ["data.name=folders", f"data.root={tmp_path / 'scans'}", "data.image_size=9", "data.test_fraction=0.5"]
    domains, shares = partition_dataset(tiny("fedavg", *settings, "partition.scheme=csv", f"partition.file={file}"))
    assert [(share.name, share.domain) for share in shares] == [
        ("Clinic, ward 1", "ward 1"),
        ("Clinic, ward 2", "ward 2"),
    ]
    assert domains.notes == ()
    assert [len(share.rows[share.domain]) for share in shares] == [4, 4]


REFUSED = {
    # the file's content, what the message names
    "two clients": (f"path,client\n{some('ink')[0]},a\n{some('ink')[0]},b\n", ["'ink/train/000000'", "'a' and to 'b'"]),
    "no column": ("path,owner\nx,a\n", ["no column 'client'; it has path, owner", "it needs path, client"]),
    "one column": ("path|client\nx|a\n", ["path|client", "it needs path, client"]),
    "nothing": ("", ["it needs path, client"]),
    "no row": ("path,client\n", ["has no rows"]),
    "no client": ("path,client\nink/train/000000,\n", ["line 2 has no client"]),
    "blanks": ("path,client\nink/train/000000,  \n", ["line 2 has no client"]),
    "short line": ("path,client\n\nink/train/000000\n", ["line 3 has 1 cells, but there are 2 columns"]),
    "no path": ("path,client\n,a\n", ["line 2 has no path"]),
    "open quote": ('path,client\n"ink/train/000000,a\n', ["line 2 is not part of a table"]),
    "not UTF-8": (b"path,client\nink/\xe9.png,a\n", ["cannot read"]),
    # Full paths where names below the root are meant: one of each, to be compared.
    "full paths": ("path,client\n/data/ink/train/000000,a\n", ["'/data/ink/train/000000'", "'ink/train/000000'"]),
    "a lost path": (
        f"path,client\n{some('ink')[0]},a\nink/lost,b\n",
        ["gives client 'b' no training image", "'ink/lost'"],
    ),
}


@pytest.mark.parametrize(("content", "named"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_does_not_say_who_holds_what_is_refused_in_one_line(
    fedcir: Command, data_root: Path, write: Write, content: str | bytes, named: list[str]
) -> None:
    file = write(content)
    sets = ["--set", "partition.scheme=csv", "--set", f"partition.file={file}"]
    output = fedcir("data", "partition", "arrays", "--data-root", data_root, *sets)
    assert (output.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert str(file) in output.err
    for name in named:
        assert name in output.err


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        ("partition.scheme=csv", "partition.file=FILE.csv"),
        ("partition.file=owners.csv", "partition.scheme=csv"),
        ("partition.scheme=csv partition.file=nowhere.csv", "nowhere.csv"),
        ("partition.scheme=csv partition.file=.", "cannot read ."),
        (
            "partition.scheme=csv partition.file=owners.csv partition.clients=3",
            "names the clients: leave partition.clients out",
        ),
        ("partition.scheme=csv partition.file=owners.csv partition.min_samples=25", "client north would hold 24"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_one_line(
    fedcir: Command, data_root: Path, write: Write, monkeypatch: pytest.MonkeyPatch, sets: str, named: str
) -> None:
    monkeypatch.chdir(write(WHOLE).parent)
    words = [word for item in sets.split() for word in ("--set", item)]
    output = fedcir("data", "partition", "arrays", "--data-root", data_root, *words)
    assert (output.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert named in output.err


@pytest.mark.parametrize("algorithm", ["fedcir", "centralized"])
def test_a_run_by_a_file_names_its_clients_and_gives_the_same_bits_again(
    write: Write, by_file: Tiny, train: Train, tmp_path: Path, algorithm: str
) -> None:
    file = write(MIXED)
    first = train(by_file(file, algorithm=algorithm), tmp_path / "first", until=1)
    train(by_file(write(MIXED, "moved.csv"), algorithm=algorithm), first, resume=True)  # a copy will do
    second = train(by_file(file, algorithm=algorithm), tmp_path / "second")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    manifest = json.loads((first / "manifest.json").read_text(encoding="utf-8"))
    assert manifest == json.loads((second / "manifest.json").read_text(encoding="utf-8"))
    assert [(client.get("name"), client["domain"]) for client in manifest["clients"]] == [
        ("north", "ink"),
        ("east", "wax"),
        (None, "pen"),
    ]
    assert manifest["clients"][0]["train"] == MIXED["north"]


def test_a_path_that_is_given_twice_to_the_same_client_counts_once(write: Write, by_file: Tiny) -> None:
    _, shares = partition_dataset(by_file(write({**WHOLE, "south": [*some("pen"), *some("pen")]})))
    assert [sum(map(len, share.rows.values())) for share in shares] == [24, 24, 24]


def test_a_held_out_domain_needs_no_owner(write: Write, by_file: Tiny) -> None:
    two = {"north": some("ink"), "east": some("wax")}
    domains, shares = partition_dataset(by_file(write(two), "partition.hold_out=pen"))
    assert [(share.name, share.domain, list(share.rows)) for share in shares] == [
        ("north", "ink", ["ink"]),
        ("east", "wax", ["wax"]),
        ("", "pen", []),
    ]
    assert domains.notes == ()  # that its images are in no row is as it should be


def test_a_client_of_the_held_out_domain_alone_is_left_out(write: Write, by_file: Tiny) -> None:
    """So that one file serves every domain's turn."""
    _, shares = partition_dataset(by_file(write(WHOLE), "partition.hold_out=ink"))
    assert [(share.name, share.domain) for share in shares] == [("south", "pen"), ("east", "wax"), ("", "ink")]
