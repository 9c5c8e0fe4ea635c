"""The run folder: what it holds."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from seven import Tiny, Train, lines, same_run, seven

import fedcir
from fedcir.runtime.run_folder import FORMAT, RunFolder

ROUND_KEYS = [
    "round",
    "losses",
    "accuracy",
    "accuracy_mean",
    "accuracy_weighted",
    "accuracy_worst",
    "bytes_down",
    "bytes_up",
    "flops",
    "seconds",
    "dropped",
    "risk",  # where a round was evaluated
    "checksum",
]


def test_a_finished_run_holds_the_files_of_the_contract_and_no_others(finished: Path) -> None:
    names = {path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.name != RunFolder.LOCK}
    assert names == {
        "config.toml",
        "manifest.json",
        "image_hashes.safetensors",
        "rounds.jsonl",
        "summary.json",
        "hits.json",
        "model.safetensors",
        "checkpoint",
        "checkpoint/round-000006.safetensors",
        "checkpoint/round-000007.safetensors",
    }


def test_config_toml_is_resolved_and_says_which_versions_wrote_it(finished: Path) -> None:
    tables = tomllib.loads((finished / "config.toml").read_text(encoding="utf-8"))
    about = tables.pop("fedcir")
    assert len(about.pop("checksum")) == 8
    assert about == {"format": 1, "version": fedcir.__version__, "torch": torch.__version__}
    sections = {"task", "data", "partition", "model", "local", "server", "algorithm", "run", "attack", "privacy"}
    assert tables.keys() == sections
    assert tables["server"]["active"] == 3
    assert tables["algorithm"]["lambda_reg"] == 0.5
    settings = {"seed": 0, "threads": 1, "device": "cpu", "layout": "channels_last"}
    assert tables["run"] == {**settings, "precision": "float32", "compile": False, "workers": 1}


def test_config_toml_has_no_number_of_workers_that_nobody_asked_for(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    config = tiny("fedavg")
    out = train(replace(config, run=replace(config.run, workers=None)), tmp_path / "run", until=0)
    assert "workers" not in tomllib.loads((out / "config.toml").read_text(encoding="utf-8"))["run"]


def test_a_run_of_before_domains_were_told_apart_still_reads(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    """It has a mean over all domains and does not say which of them nobody trains on."""
    run = train(tiny("fedavg", "partition.hold_out=pen"), tmp_path / "run")
    new = ("unseen", "accuracy_unseen", "checksum")
    old = [{key: value for key, value in line.items() if key not in new} for line in lines(run)]
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    records = RunFolder(run).records()
    assert len(records) == 3
    assert (records[-1].unseen, records[-1].accuracy_unseen) == (None, None)
    assert records[-1].risk is not None
    assert records[-1].risk_mean == pytest.approx(sum(records[-1].risk.values()) / 3)


def test_the_config_of_a_run_starts_the_same_run(finished: Path, train: Train, tmp_path: Path) -> None:
    assert same_run(train(RunFolder(finished).config(), tmp_path / "again"), finished)


def test_the_manifest_names_every_sample_of_every_client_and_has_a_hash(finished: Path) -> None:
    manifest = json.loads((finished / "manifest.json").read_text(encoding="utf-8"))
    assert [(client["id"], client["domain"]) for client in manifest["clients"]] == [(0, "ink"), (1, "pen"), (2, "wax")]
    for client in manifest["clients"]:
        assert client["train"] == [f"{client['domain']}/train/{i:06d}" for i in range(24)]
    assert {name: len(ids) for name, ids in manifest["test"].items()} == {"ink": 12, "pen": 12, "wax": 12}
    assert len(manifest["hash"]) == 32


def test_clients_that_share_domains_hold_every_sample_once(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    config = tiny("fedavg", "server.rounds=1", "partition.scheme=dirichlet", "partition.clients=5")
    manifest = RunFolder(train(config, tmp_path / "run")).manifest()
    held = [sample for client in manifest["clients"] for sample in client["train"]]
    assert sorted(held) == [f"{name}/train/{i:06d}" for name in ("ink", "pen", "wax") for i in range(24)]


def test_rounds_jsonl_has_a_line_a_round_from_1_with_exactly_the_keys_of_the_contract(finished: Path) -> None:
    records = lines(finished)
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5, 6, 7]
    for record in records:
        assert list(record) == ROUND_KEYS
        assert record["accuracy"].keys() == {"ink", "pen", "wax"}
        assert all(0 <= value <= 1 for value in record["accuracy"].values())
        assert "total" in record["seconds"]
        assert record["flops"] > 0
        assert record["dropped"] == {}
    assert records[0]["losses"].keys() == {"ce", "total"}
    assert records[1]["losses"].keys() == {"ce", "reg", "align", "total"}


def test_the_summary_has_the_keys_of_the_contract_and_agrees_with_the_rounds(finished: Path) -> None:
    summary, records = json.loads((finished / "summary.json").read_text(encoding="utf-8")), lines(finished)
    keys = {"algorithm", "dataset", "seed", "rounds", "final", "best", "saved", "cost", "model", "checksum"}
    assert summary.keys() == keys
    assert summary["saved"] == {"round": 7, "keep": "last"}
    assert [summary[key] for key in ("algorithm", "dataset", "seed", "rounds")] == ["fedcir", "arrays", 0, 7]
    accuracies = ("round", "accuracy_mean", "accuracy_weighted", "accuracy_worst", "accuracy")
    assert summary["final"] == {key: records[-1][key] for key in accuracies}
    best = max(records, key=lambda record: record["accuracy_mean"])  # the first of equals
    assert summary["best"] == {**{key: best[key] for key in accuracies}, "picked_on": "test"}
    for name in ("bytes_down", "bytes_up", "flops"):
        assert summary["cost"][name] == sum(record[name] for record in records)
    assert summary["cost"]["seconds"]["total"] == pytest.approx(sum(record["seconds"]["total"] for record in records))


def test_the_model_says_how_to_use_it(finished: Path) -> None:
    with safe_open(finished / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) >= {"head.weight", "head.bias"}
        assert all(name.startswith(("encoder.", "head.")) for name in file.keys())  # noqa: SIM118 (not a dict)
    card = json.loads(metadata.pop("fedcir"))
    assert metadata == {}
    assert card["format"] == FORMAT
    assert card["classes"] == ["0", "1", "2"]
    assert (card["image_size"], card["channels"]) == (8, 3)
    assert (card["mean"], card["std"]) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert card["model"] == {"name": "cnn", "width": 2, "norm": "batch", "batchnorm": "average", "freeze": False}
    assert card["algorithm"]["name"] == "fedcir"


def test_the_model_tells_no_time_path_worker_count_or_version(finished: Path, data_root: Path) -> None:
    with safe_open(finished / "model.safetensors", framework="pt") as file:
        text = json.dumps(file.metadata())
    for private in (fedcir.__version__, torch.__version__, str(data_root), str(finished.parent), "workers", "threads"):
        assert private not in text


def test_the_model_of_an_own_algorithm_does_not_tell_where_its_file_lay(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    models = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        mine = tmp_path / folder / "mine.py"
        mine.write_text("import fedcir\n\n\nclass Mine(fedcir.FedAvg):\n    pass\n")
        config = tiny(str(mine), "server.rounds=1")
        models.append((train(config, tmp_path / folder / "run") / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_equal_runs_are_equal_files(tiny: Tiny, train: Train, finished: Path, tmp_path: Path) -> None:
    again = train(seven(tiny), tmp_path / "again")
    assert same_run(again, finished)
    assert (again / "config.toml").read_bytes() == (finished / "config.toml").read_bytes()
    for path in (finished / "checkpoint").iterdir():
        with safe_open(path, "pt") as a, safe_open(again / "checkpoint" / path.name, "pt") as b:
            assert all(torch.equal(a.get_tensor(key), b.get_tensor(key)) for key in a.keys())  # noqa: SIM118


@pytest.mark.parametrize("change", ["run.seed=1", "local.lr=0.02", "algorithm.lambda_reg=0.4"])
def test_other_settings_give_another_model(
    tiny: Tiny, train: Train, finished: Path, tmp_path: Path, change: str
) -> None:
    other = train(tiny("fedcir", "server.rounds=7", change), tmp_path / "other")
    assert (other / "model.safetensors").read_bytes() != (finished / "model.safetensors").read_bytes()


def test_a_model_does_not_depend_on_how_often_it_was_saved(
    tiny: Tiny, train: Train, finished: Path, tmp_path: Path
) -> None:
    seldom = train(tiny("fedcir", "server.rounds=7", "server.checkpoint_every=4"), tmp_path / "seldom")
    assert same_run(seldom, finished)
    assert sorted(path.name for path in (seldom / "checkpoint").iterdir()) == [
        "round-000004.safetensors",
        "round-000007.safetensors",
    ]


def test_no_file_of_a_run_is_a_pickle(finished: Path) -> None:
    for path in finished.rglob("*"):
        if path.is_dir() or path.name == RunFolder.LOCK:
            continue
        content = path.read_bytes()
        if path.suffix == ".safetensors":
            assert content[8:10] == b'{"'  # after the length of its header
            with safe_open(path, framework="pt") as file:
                assert file.keys()
        elif path.suffix == ".toml":
            assert tomllib.loads(content.decode())
        else:
            assert path.suffix in {".json", ".jsonl"}
            assert all(json.loads(part) for part in (content.splitlines() if path.suffix == ".jsonl" else [content]))


def test_the_reader_of_rounds_may_look_at_any_moment_of_a_write(finished: Path, tmp_path: Path) -> None:
    content = (finished / "rounds.jsonl").read_bytes()
    start = content.index(b"\n") + 1
    for end in range(start, content.index(b"\n", start) + 1):
        (tmp_path / "rounds.jsonl").write_bytes(content[:end])
        assert [record.round for record in RunFolder(tmp_path).records()] == [1]
