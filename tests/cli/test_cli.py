"""The command line: what `run`, `compare`, `algorithms` and `data` print, and which files they write."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from user_files import MINE, Command, check_refused

from fedcir import algorithms
from fedcir.runtime.run_folder import RunFolder


def test_run_says_how_it_goes_in_plain_lines_and_prints_a_table(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    output = fedcir("run", *options, "--algorithm", "fedavg", "--out", "run")
    assert output.code == 0
    lines = output.err.splitlines()
    assert len(lines) == 3
    for number, line in enumerate(lines, start=1):
        assert re.fullmatch(
            rf"arrays-fedavg-0: round {number}/3  ce \S+ total \S+  acc \d+\.\d%, worst \d+\.\d%  \d+:\d\d left", line
        )
    assert all(char.isprintable() or char == "\n" for char in output.err + output.out)
    assert "fedavg on arrays, test accuracy (%); the best round is picked on test data" in output.out
    assert output.out.endswith("saved in run\n")
    final = RunFolder(workspace / "run").summary()["final"]
    row = next(line for line in output.out.splitlines() if "last round, 3" in line)
    assert row.split()[3:] == [
        f"{100 * value:.1f}"
        for value in [
            *final["accuracy"].values(),
            final["accuracy_mean"],
            final["accuracy_weighted"],
            final["accuracy_worst"],
        ]
    ]


def test_a_held_out_domain_is_marked_and_kept_out_of_the_mean(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    command = ["compare", *options, "--hold-out", "pen", "--algorithms", "fedavg", "--workers", "1", "-o", "both"]
    output = fedcir(*command)
    assert output.code == 0, output.err
    assert all(", unseen " in line for line in output.err.splitlines())
    header, _, row = (workspace / "both" / "comparison.md").read_text().splitlines()
    assert header.startswith("| method | ink | wax | pen (not trained on) | seen mean | worst | unseen mean |")
    final = RunFolder(workspace / "both" / "fedavg-0").summary()["final"]
    ink, wax, pen = (100 * final["accuracy"][name] for name in ("ink", "wax", "pen"))
    assert row.startswith(
        f"| fedavg | {ink:.1f} | {wax:.1f} | {pen:.1f} | {(ink + wax) / 2:.1f} | {min(ink, wax):.1f} | {pen:.1f} |"
    )
    output = fedcir("run", *options, "--hold-out", "pen", "--algorithm", "fedavg", "--out", "run")
    assert "pen (not trained on)" in output.out
    assert "seen mean" in output.out
    last = next(line for line in output.out.splitlines() if "last round, 3" in line)
    assert last.split()[-1] == f"{pen:.1f}"


def test_compare_says_what_to_do_next(fedcir: Command, options: list[str], workspace: Path) -> None:
    output = fedcir("compare", *options, "--algorithms", "fedavg,fedprox", "--workers", "1", "-o", "both")
    assert "at chance level" in output.out  # after three rounds of two steps
    assert "Use " not in output.out
    assert "Try `--seeds 0,1,2`." in output.out


def test_rounds_without_evaluation_are_not_lines(fedcir: Command, options: list[str], workspace: Path) -> None:
    output = fedcir("run", *options, "--algorithm", "fedavg", "--out", "run", "--eval-every", "2")
    assert [line.split()[2] for line in output.err.splitlines()] == ["2/3", "3/3"]


def test_json_is_the_summary_alone_on_standard_output(fedcir: Command, options: list[str], workspace: Path) -> None:
    output = fedcir("run", *options, "--algorithm", "fedavg", "--out", "run", "--json")
    assert output.code == 0
    kept = json.loads((workspace / "run" / "summary.json").read_text())
    del kept["checksum"]
    assert json.loads(output.out) == kept
    assert output.out.count("\n") == 1


def test_quiet_prints_nothing(fedcir: Command, options: list[str], workspace: Path) -> None:
    output = fedcir("run", *options, "--algorithm", "fedavg", "--out", "run", "--quiet")
    assert output == (0, "", "")
    assert RunFolder(workspace / "run").finished
    assert fedcir("run", *options, "--algorithm", "fedavg", "--out", "run", "--quiet", "--resume") == (0, "", "")


def test_without_out_a_run_lies_in_runs_by_its_dataset_algorithm_and_seed(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    assert fedcir("run", *options, "--algorithm", "fedavg", "--seed", "7", "--quiet").code == 0
    assert RunFolder(workspace / "runs" / "arrays-fedavg-7").finished


def test_lr_and_batch_size_are_options(fedcir: Command, options: list[str], workspace: Path) -> None:
    given = ["--lr", "0.5", "--batch-size", "4", "--algorithm", "fedavg"]
    assert fedcir("run", *options, *given, "--out", "run", "--quiet").code == 0
    local = RunFolder(workspace / "run").config().local
    assert (local.lr, local.batch_size) == (0.5, 4)


def test_an_option_wins_over_the_file_and_set_wins_over_both(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    (workspace / "own.toml").write_text(
        "[server]\nrounds = 9\neval_every = 2\n[local]\nlr = 0.5\n[algorithm]\nname = 'fedcir'\nhidden = 4\n"
    )
    assert fedcir("run", "own.toml", *options, "--out", "run", "--quiet", "--set", "local.steps=1").code == 0
    config = RunFolder(workspace / "run").config()
    assert (config.server.rounds, config.server.eval_every) == (3, 2)
    assert (config.local.steps, config.local.lr) == (1, 0.5)
    assert config.algorithm.fields["hidden"] == 4


def test_an_own_algorithm_in_a_file_trains(fedcir: Command, options: list[str], workspace: Path) -> None:
    output = fedcir("run", *options, "--algorithm", "./mine.py", "--set", "algorithm.mu=0.3", "--out", "run")
    assert output.code == 0
    assert "arrays-mine-0: round 3/3" in output.err
    run = RunFolder(workspace / "run")
    assert run.config().algorithm.fields == {"mu": 0.3}
    assert all(record.losses.keys() == {"ce", "near", "total"} for record in run.records())
    shown = fedcir("algorithms", "./mine.py")
    assert "Weight of the proximal term." in shown.out
    assert "Mine: FedAvg that stays near the global model." in shown.out


@pytest.mark.parametrize("name", ["torch", "json", "fedcir", "typer"])
def test_an_own_algorithm_may_have_any_name(
    fedcir: Command, options: list[str], workspace: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[name]
    monkeypatch.setitem(sys.modules, name, module)  # put back at the end
    (workspace / f"{name}.py").write_text(MINE)
    output = fedcir("run", *options, "--rounds", "1", "--algorithm", f"./{name}.py", "--out", "run", "--quiet")
    assert sys.modules[name] is module
    assert output == (0, "", "")


def test_algorithms_lists_every_method_with_its_idea(fedcir: Command) -> None:
    output = fedcir("algorithms")
    assert output.code == 0
    assert [line.split()[0] for line in output.out.splitlines()[3:] if line.strip()] == algorithms.list_algorithms()
    listed = json.loads(fedcir("algorithms", "--json").out)
    assert [item["name"] for item in listed] == algorithms.list_algorithms()
    assert all(item["idea"] and item["citation"] for item in listed)


def test_an_algorithm_is_shown_with_every_field_its_default_and_its_meaning(fedcir: Command) -> None:
    output = fedcir("algorithms", "fedcir")
    assert output.code == 0
    assert "https://arxiv.org/abs/2308.15786" in output.out
    assert re.search(r"^up: +model [0-9,]+ bytes$", output.out, re.MULTILINE)
    assert re.search(r"lambda_align +number, 0 to 1,000,000 +1e-06 +Weight of the KL", output.out)
    shown = json.loads(fedcir("algorithms", "fedcir", "--json").out)
    assert all(field["doc"] for field in shown["fields"])
    assert shown["up"].keys() == {"model"}
    assert shown["down"].keys() == {"model", "generator", "gaussians"}


def test_data_list_names_the_datasets(fedcir: Command) -> None:
    output = fedcir("data", "list")
    assert output.code == 0
    assert json.loads(fedcir("data", "list", "--json").out).keys() >= {"minidigits", "arrays"}
    assert "minidigits" in output.out
    assert "arrays" in output.out


def test_data_show_draws_a_picture_and_counts_the_samples(fedcir: Command, data_root: Path, workspace: Path) -> None:
    output = fedcir("data", "show", "arrays", "--data-root", data_root, "-o", "sheet.png")
    assert output.code == 0
    assert "3 classes, 8x8 pixels" in output.out
    assert re.search(r"pen +24 +12", output.out)
    with Image.open(workspace / "sheet.png") as sheet:
        assert sheet.format == "PNG"
        assert len(sheet.getcolors(sheet.width * sheet.height)) > 20


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != RunFolder.LOCK
    }


def test_compare_trains_what_is_not_finished_and_puts_all_side_by_side(
    fedcir: Command, tiny: Callable[..., Any], train: Callable[..., Path], options: list[str], workspace: Path
) -> None:
    """Two methods and two seeds, of which seed 0 was trained before."""
    both, runs = workspace / "both", ["fedavg-0", "fedavg-1", "fedcir-0", "fedcir-1"]
    train(tiny("fedavg", "server.rounds=2"), both / "fedavg-0")
    train(tiny("fedcir", "server.rounds=2", "algorithm.hidden=256"), both / "fedcir-0")
    before = content(both)
    command = ["compare", *options, "--algorithms", "fedavg,fedcir", "--seeds", "0,1", "--workers", "1", "-o", "both"]
    check_refused(fedcir(*command, "--rounds", "2"), ["both/fedavg-0 already holds a run", "resume it"])
    output = fedcir(*command, "--rounds", "2", "--resume")
    assert output.code == 0
    assert {path: state for path, state in content(both).items() if path in before} == before
    assert sorted(path.name for path in both.iterdir()) == [
        *(f"comparison.{kind}" for kind in ("csv", "json", "md", "tex")),
        "curves.png",
        *runs,
        "settings",
    ]
    with Image.open(both / "curves.png") as curves:
        assert curves.format == "PNG"
    accuracy = {name: RunFolder(both / name).summary()["final"]["accuracy_mean"] for name in runs}
    first, second = json.loads((both / "comparison.json").read_text())
    assert (first["algorithm"], second["algorithm"]) == ("fedavg", "fedcir")
    assert first["mean"]["mean"] == pytest.approx((accuracy["fedavg-0"] + accuracy["fedavg-1"]) / 2)
    differences = [accuracy[f"fedcir-{seed}"] - accuracy[f"fedavg-{seed}"] for seed in (0, 1)]
    assert second["difference"]["mean"] == pytest.approx(sum(differences) / 2)
    table = (both / "comparison.md").read_text().splitlines()
    assert table[0].startswith("| method | ink | pen | wax | mean | worst |")
    for row in (table[2], table[3]):
        for cell in row.strip("| ").split(" | "):
            assert cell in output.out
    assert "test accuracy after the last round (%), 2 seeds" in output.out
    assert len(output.err.splitlines()) == 8
    assert "fedcir-1: round 2/2" in output.err


def test_compare_resumes_a_run_whose_last_rounds_must_be_done_again(
    fedcir: Command, tiny: Callable[..., Any], train: Callable[..., Path], options: list[str], workspace: Path
) -> None:
    """As a kill leaves it: five rounds are recorded, two of them after the last checkpoint."""
    settings = ("server.rounds=6", "server.checkpoint_every=3")
    out = train(tiny("fedavg", *settings), workspace / "both" / "fedavg-0", until=5)
    (out / "checkpoint" / "round-000005.safetensors").unlink()
    rounds = out / "rounds.jsonl"
    rounds.write_text(re.sub(r'("write": )[0-9.e-]+', r"\g<1>1.0", rounds.read_text()))  # other times, another length
    more = [part for setting in settings for part in ("--set", setting)]
    output = fedcir("compare", *options, *more, "--algorithms", "fedavg", "--resume", "-o", "both")
    assert output.code == 0
    assert RunFolder(out).finished
    assert output.err.splitlines()[-1].startswith("fedavg-0: round 6/6")


def test_compare_refuses_a_number_of_workers_below_1(fedcir: Command, options: list[str], workspace: Path) -> None:
    check_refused(fedcir("compare", *options, "--algorithms", "fedavg", "--workers", "-1"), ["workers", "-1"])


def test_compare_takes_a_field_that_only_some_methods_have(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    setting = ["--rounds", "1", "--set", "algorithms.fedcir.hidden=8"]
    output = fedcir("compare", *options, *setting, "--algorithms", "fedavg,fedcir", "-o", "both", "--workers", "1")
    assert output.code == 0
