"""Withdrawal of a site: the model is that of a run which never had its data, and the record shows what was removed."""

import dataclasses
import inspect
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedcir import Config, InputError, forget, load_run
from fedcir.algorithms import find_algorithm, list_algorithms
from fedcir.analysis.withdrawal import read_record
from fedcir.config import config_from_tables, config_to_tables, merge_tables, parse_assignment
from fedcir.server.accounting import sample_cohort
from warm_process import Output

Train = Callable[..., Path]
SKEWED = ("partition.scheme=dirichlet", "partition.clients=9", "partition.beta=0.5", "server.active=2")


def change(config: Config, *assignments: str) -> Config:
    tables = config_to_tables(config)
    for assignment in assignments:
        tables = merge_tables(tables, parse_assignment(assignment))
    return config_from_tables(tables)


def model_of(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def records_of(run: Path) -> list[object]:
    return [dataclasses.replace(record, seconds={}) for record in load_run(run).records]


def copy_data(root: Path, copy: Path, edit: Callable[[str, dict[str, np.ndarray]], None]) -> Path:
    """Copy a folder of arrays, with the arrays of each domain edited."""
    copy.mkdir()
    for file in sorted(root.glob("*.npz")):
        arrays = dict(np.load(file))
        edit(file.stem, arrays)
        np.savez(copy / file.name, **arrays)
    return copy


def withdraw_at_random(tiny: Callable[..., Config], train: Train, root: Path, folder: Path, number: int) -> None:
    """Withdraw a random client of a random partition, and compare with a run on data without its images."""
    rng = np.random.default_rng(number)
    clients, standardise = int(rng.integers(9, 15)), rng.choice(["federation", "domain", "none"])
    settings = ("model.freeze=true", "server.rounds=1", f"run.seed={number}", f"algorithm.standardise={standardise}")
    config = tiny("fedcirone", *settings)
    shares = ("partition.scheme=dirichlet", f"partition.clients={clients}", "partition.beta=1")
    run = train(change(config, *shares), folder / "run")
    manifest = load_run(run).manifest["clients"]
    labels = {file.stem: np.load(file)["y_train"] for file in root.glob("*.npz")}
    for site in rng.permutation(clients).tolist():
        names = [name.rpartition("/train/") for name in manifest[site]["train"]]
        removed = {domain: [int(row) for home, _, row in names if home == domain] for domain in labels}
        if all(len(np.unique(np.delete(labels[domain], removed[domain]))) == 3 for domain in labels):
            break  # files without its images are a dataset of the same classes

    def remove(domain: str, arrays: dict[str, np.ndarray]) -> None:
        for name in ("x_train", "y_train"):
            arrays[name] = np.delete(arrays[name], removed[domain], axis=0)

    never = train(change(config, f"data.root={copy_data(root, folder / 'rest', remove)}"), folder / "never")
    withdrawal = forget(run, str(site), out=folder / "out")
    assert model_of(withdrawal.path) == model_of(never) != model_of(run)
    assert withdrawal.record["images"] == sum(map(len, removed.values()))


@pytest.mark.parametrize("number", range(3))
def test_in_closed_form_the_model_is_that_of_data_without_the_clients_images(
    tiny: Callable[..., Config], train: Train, data_root: Path, tmp_path: Path, number: int
) -> None:
    withdraw_at_random(tiny, train, data_root, tmp_path, number)


@pytest.mark.slow
def test_a_hundred_random_withdrawals_are_equal_to_the_byte(
    tiny: Callable[..., Config], train: Train, data_root: Path, tmp_path: Path
) -> None:
    for number in range(100):
        (folder := tmp_path / str(number)).mkdir()
        withdraw_at_random(tiny, train, data_root, folder, number)


@pytest.mark.parametrize("method", ["fedavg", "fedcir", "scaffold", "fedbn", "fedproto", "feddyn", "centralized"])
def test_the_model_is_that_of_a_run_whose_site_has_other_images_or_none(
    tiny: Callable[..., Config], train: Train, data_root: Path, tmp_path: Path, method: str
) -> None:
    config = tiny(method, "server.active=2")
    run = train(config, tmp_path / "run")
    never = train(change(config, "partition.exclude=pen"), tmp_path / "never")
    result = forget(run, "pen", out=tmp_path / "out")

    def darken(domain: str, arrays: dict[str, np.ndarray]) -> None:
        if domain == "pen":
            arrays["x_train"], arrays["x_test"] = arrays["x_train"] // 2, arrays["x_test"] // 2

    dark = copy_data(data_root, tmp_path / "dark", darken)
    unseen = train(change(config, "partition.exclude=pen", f"data.root={dark}"), tmp_path / "unseen")
    assert model_of(result.path) == model_of(never) == model_of(unseen)
    assert records_of(result.path) == records_of(never) == records_of(unseen)
    assert records_of(run) != records_of(never)
    assert "pen" not in json.dumps(load_run(never).manifest["test"]) + json.dumps(records_of(never), default=vars)
    assert load_run(never).manifest["clients"][1]["train"] == []


def test_the_last_domain_can_as_well_be_taken_out_of_the_folder(
    tiny: Callable[..., Config], train: Train, data_root: Path, tmp_path: Path
) -> None:
    result = forget(train(tiny("fedcir"), tmp_path / "run"), "wax", out=tmp_path / "out")
    root = copy_data(data_root, tmp_path / "data", lambda domain, arrays: None)
    (root / "wax.npz").unlink()
    never = train(change(tiny("fedcir"), f"data.root={root}"), tmp_path / "never")
    assert model_of(result.path) == model_of(never)
    assert records_of(result.path) == records_of(never)


def test_two_withdrawals_are_a_run_that_neither_site_joined(
    tiny: Callable[..., Config], train: Train, tmp_path: Path
) -> None:
    config = tiny("fedavg", *SKEWED)
    first = forget(train(config, tmp_path / "run"), "4", out=tmp_path / "first")
    second = forget(first.path, "7", out=tmp_path / "second")
    never = train(change(config, "partition.exclude=4,7"), tmp_path / "never")
    assert model_of(second.path) == model_of(never)
    with pytest.raises(InputError, match="'4' holds no training images"):
        forget(first.path, "4", out=tmp_path / "third")


@pytest.mark.parametrize(("method", "repeated_from"), [("moon", 6), ("fedbn", 6), ("scaffold", 1)])
def test_rounds_before_a_site_took_part_are_taken_over(
    tiny: Callable[..., Config], train: Train, tmp_path: Path, method: str, repeated_from: int
) -> None:
    config = tiny(method, *SKEWED, "server.rounds=6", "server.checkpoint_every=1", "run.seed=4")
    site = 8  # takes part in the sixth round for the first time
    cohorts = [sample_cohort(range(9), 2, 4, round) for round in range(1, 7)]
    assert [round for round, cohort in enumerate(cohorts, 1) if site in cohort] == [6]
    run = train(config, tmp_path / "run")
    result = forget(run, str(site), out=tmp_path / "out")
    never = train(change(config, f"partition.exclude={site}"), tmp_path / "never")
    assert result.record["rounds"] == {"total": 6, "repeated_from": repeated_from}
    assert model_of(result.path) == model_of(never)
    assert records_of(result.path) == records_of(never)
    clients = [sorted(path.relative_to(folder) for path in (folder / "clients").rglob("*.safetensors"))
               for folder in (result.path, never)]  # fmt: skip
    assert str(site) not in {path.parts[0] for path in clients[0]}
    assert {path.parts[0] for path in clients[0]} == {path.parts[0] for path in clients[1]}


def test_a_method_declares_whether_it_counts_clients() -> None:
    for name in list_algorithms():
        method = find_algorithm(name)
        assert method.counts_clients == ("ctx.clients" in inspect.getsource(sys.modules[method.__module__])), name


def test_absent_clients_change_only_the_rounds_that_would_draw_them() -> None:
    everyone, rest = range(8), [0, 1, 2, 4, 5, 6, 7]
    for round in range(1, 50):
        before, after = sample_cohort(everyone, 3, 0, round), sample_cohort(rest, 3, 0, round, absent=[3])
        assert len(set(after)) == 3
        assert 3 not in after
        assert after == before if 3 not in before else {*before} - {3} < {*after}


@pytest.mark.parametrize(
    ("site", "settings", "message"),
    [
        ("chalk", (), "there is no site 'chalk'"),
        ("3", (), "give a client's number below 3"),
        ("ink", ("partition.scheme=iid",), "images of domain 'ink' lie at clients with others"),
        ("ink", ("partition.hold_out=ink",), "site 'ink' holds no training images"),
    ],
)
def test_a_site_that_cannot_be_removed_is_refused_before_anything_is_written(
    tiny: Callable[..., Config], train: Train, tmp_path: Path, site: str, settings: tuple[str, ...], message: str
) -> None:
    run = train(tiny("fedavg", "server.rounds=1", *settings), tmp_path / "run")
    with pytest.raises(InputError, match=message):
        forget(run, site, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (run / "forget.key").exists()


def test_the_only_site_an_unfinished_run_and_a_used_folder_are_refused(
    tiny: Callable[..., Config], train: Train, tmp_path: Path
) -> None:
    run = train(tiny("fedavg", "server.rounds=1", "partition.exclude=ink,wax"), tmp_path / "run")
    with pytest.raises(InputError, match="no other site has training images"):
        forget(run, "pen", out=tmp_path / "out")
    unfinished = train(tiny("fedavg"), tmp_path / "unfinished", until=1)
    with pytest.raises(InputError, match="holds no finished run"):
        forget(unfinished, "pen", out=tmp_path / "out")
    with pytest.raises(InputError, match="already exists: choose another folder"):
        forget(run, "pen", out=unfinished)
    assert not (tmp_path / "out").exists()


def test_the_record_is_signed_and_a_change_shows(
    tiny: Callable[..., Config], train: Train, tmp_path: Path, fedcir: Callable[..., Output]
) -> None:
    run = train(tiny("fedavg"), tmp_path / "run")
    printed = fedcir("forget", run, "pen", "-o", tmp_path / "out", "--key", tmp_path / "key")
    assert printed.code == 0, printed.err
    assert "removed pen: 24 training images; rounds 1 to 3 were run again without them" in printed.out
    assert "advantage" in printed.out
    file = tmp_path / "out" / "forget.json"
    record, fingerprint = read_record(file)
    assert fingerprint in printed.out
    assert (record["site"], record["clients"], record["images"]) == ("pen", [1], 24)
    assert record["before"]["manifest"] == load_run(run).manifest["hash"] != record["after"]["manifest"]
    assert -1 <= record["after"]["membership"]["advantage"]["value"] <= 1
    assert str(tmp_path) not in file.read_text()
    (tmp_path / "changed.json").write_text(file.read_text().replace('"images": 24', '"images": 25'))
    with pytest.raises(InputError, match="its signature does not match"):
        read_record(tmp_path / "changed.json")
    (tmp_path / "out" / "model.safetensors").write_bytes(model_of(run))
    with pytest.raises(InputError, match="is not the model of this record"):
        read_record(file)
    refused = fedcir("forget", run, "pen", "-o", tmp_path / "out")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


@pytest.mark.parametrize("command", ["evaluate", "audit", "diagnose", "report"])
def test_the_new_run_is_an_ordinary_one(
    tiny: Callable[..., Config], train: Train, tmp_path: Path, fedcir: Callable[..., Output], command: str
) -> None:
    run = train(tiny("fedavg", "partition.exclude=pen"), tmp_path / "run")
    more = {"audit": ["--steps", 0]}.get(command, [])
    printed = fedcir(command, run, *more, *([] if command == "evaluate" else ["-o", tmp_path / "new.png"]))
    assert printed.code == 0, printed.err
    assert "pen" not in printed.out.replace(str(tmp_path), "").replace("open it", "")


@pytest.mark.parametrize("standardise", ["domain", "client", "auto"])
def test_stored_sums_make_the_same_model_when_the_images_are_gone(
    tiny: Callable[..., Config], train: Train, data_root: Path, tmp_path: Path, standardise: str
) -> None:
    root = copy_data(data_root, tmp_path / "data", lambda domain, arrays: None)
    settings = ("model.freeze=true", "data.val_fraction=0.2", f"algorithm.standardise={standardise}", *SKEWED[:3])
    run = train(tiny("fedcirone", *settings, "server.store_sums=true", f"data.root={root}"), tmp_path / "run")
    with_images = forget(run, "4", out=tmp_path / "with")
    shutil.rmtree(root)
    without = forget(run, "4", out=tmp_path / "without")
    assert model_of(without.path) == model_of(with_images.path) != model_of(run)
    names = ("site", "clients", "images", "images_sha256", "rounds")
    assert [without.record[name] for name in names] == [with_images.record[name] for name in names]
    assert (without.before, without.after) == (None, None)
    assert without.record["after"]["model_sha256"] == with_images.record["after"]["model_sha256"]
    again = forget(without.path, "2", out=tmp_path / "again")
    assert model_of(again.path) != model_of(without.path)
    with pytest.raises(InputError, match="there is no site 'nowhere'"):
        forget(run, "nowhere", out=tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_an_interrupted_withdrawal_leaves_no_folder(tiny: Callable[..., Config], train: Train, tmp_path: Path) -> None:
    run = train(tiny("fedavg", "server.rounds=2"), tmp_path / "run")

    def interrupt(*progress: object, what: str = "") -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forget(run, "pen", out=tmp_path / "out", on_work=interrupt)
    assert not (tmp_path / "out").exists()
    shutil.copytree(run, tmp_path / "out")  # as a process that was killed leaves it
    with pytest.raises(InputError, match="delete this one, if a withdrawal that did not end left it there"):
        forget(run, "pen", out=tmp_path / "out")


def test_stored_sums_take_out_the_domain_of_a_name_before_the_client_of_that_number(
    tiny: Callable[..., Config], train: Train, data_root: Path, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    for number, file in enumerate(sorted(data_root.glob("*.npz"))):
        shutil.copy(file, root / f"{number + 1}.npz")  # the domain "1" is at the client 0
    settings = ("model.freeze=true", "server.store_sums=true", f"data.root={root}")
    run = train(tiny("fedcirone", *settings), tmp_path / "run")
    mixed = train(tiny("fedcirone", *settings, "partition.scheme=iid", "partition.clients=3"), tmp_path / "mixed")
    with_images = forget(run, "1", out=tmp_path / "with")
    shutil.rmtree(root)
    without = forget(run, "1", out=tmp_path / "without")
    assert without.record["clients"] == with_images.record["clients"] == [0]
    assert model_of(without.path) == model_of(with_images.path)
    with pytest.raises(InputError, match="images of domain '1' may lie at clients with others"):
        forget(mixed, "1", out=tmp_path / "nothing")
