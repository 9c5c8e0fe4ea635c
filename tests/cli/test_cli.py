"""The command line: what it prints, and how it refuses."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.main import get_command

from fedcir import __version__, algorithms
from fedcir.cli import app
from fedcir.cli.reproduce import IDS
from fedcir.engine.folder import RunFolder
from fedcir.insight.experiments import ids

Command = Callable[..., Any]

MINE = '''"""Mine: FedAvg that stays near the global model."""

from dataclasses import dataclass

import fedcir
from fedcir import Losses


@dataclass(frozen=True)
class Mine(fedcir.FedAvg):
    """Nobody, 2024. https://example.org"""

    mu: float = 0.1
    """Weight of the proximal term."""

    def local_loss(self, modules, x, y, ctx):
        losses = super().local_loss(modules, x, y, ctx)
        anchor = ctx.received["model"]
        near = 0.5 * sum(((p - anchor[name]) ** 2).sum() for name, p in modules["model"].named_parameters())
        return Losses(losses.total + self.mu * near, {**losses.terms, "near": near})
'''


def arrays(root: Path, **domains: dict[str, Any]) -> Path:
    """A folder of domains with the labels given, of which the test set holds each once."""
    root.mkdir()
    for name, labels in domains.items():
        train, test = np.asarray(labels), np.unique(labels)
        images = [np.zeros((len(y), 8, 8, 3), np.uint8) for y in (train, test)]
        np.savez(root / f"{name}.npz", x_train=images[0], y_train=train, x_test=images[1], y_test=test)
    return root


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds everything a user may point at by mistake."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("[local\nlr = 1")
    (tmp_path / "latin.toml").write_bytes(b"[data]\nname = '\xe9'")
    (tmp_path / "section.toml").write_text("[locale]\nlr = 0.1")
    (tmp_path / "field.toml").write_text("[local]\nlearning = 0.1")
    (tmp_path / "typed.toml").write_text("[local]\nlr = 'fast'")
    (tmp_path / "flat.toml").write_text("partition = 3")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "syntax.py").write_text("def (:\n")
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "two.py").write_text("import fedcir\nclass A(fedcir.FedAvg): ...\nclass B(fedcir.FedAvg): ...\n")
    arrays(tmp_path / "gap", ink=[0, 1, 3, 3], pen=[0, 1, 3, 3])
    arrays(tmp_path / "lonely", ink=[0, 1, 2, 0], pen=[1, 1, 1, 1])
    arrays(tmp_path / "single", ink=[0, 0, 0, 0])
    arrays(tmp_path / "none")
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / "ink.npz").write_text("not a zip")
    tiny_images = np.zeros((6, 4, 4, 3), np.uint8)
    (tmp_path / "minute").mkdir()
    labels = np.arange(6) % 3
    np.savez(
        tmp_path / "minute" / "ink.npz", x_train=tiny_images, y_train=labels, x_test=tiny_images + 1, y_test=labels
    )
    return tmp_path


REFUSED = [
    # options, what the message names
    ("--dataset arays", ["'arays'", "did you mean 'arrays'?"]),
    ("--dataset=", ["no dataset ''"]),
    ("--data-root nowhere", ["nowhere"]),
    ("--data-root file", ["file"]),
    ("--data-root none", ["none", "<domain>.npz"]),
    ("--data-root spoilt", ["spoilt/ink.npz"]),
    ("--data-root gap", ["no image in gap has the label 2"]),
    ("--data-root lonely", ["domain 'pen'", "only the class '1'"]),
    ("--data-root single", ["only one class, '0'"]),
    ("--set local.lr=nan", ["local.lr", "nan"]),
    ("--set local.lr=fast", ["local.lr must be a number, got 'fast'"]),
    ("--set local.lr", ["section.field=value", "'local.lr'"]),
    ("--set local.rate=1", ["'rate'", "[local]"]),
    ("--set locale.lr=1", ["[locale]", "did you mean 'local'?"]),
    ("--set local.stops=1", ["'stops'", "did you mean 'steps'?"]),
    ("--set local.steps=1.5", ["local.steps must be a whole number, got 1.5"]),
    ("--set run.seed=true", ["run.seed must be a whole number, got True"]),
    ("--set local.schedule=cosin", ["'cosin'", "did you mean 'cosine'?"]),
    ("--algorithm fedcir --set algorithm.lambda_ref=1", ["'lambda_ref'", "did you mean 'lambda_reg'?"]),
    ("--algorithm fedcir --set algorithm.lambda_reg=-1", ["algorithm.lambda_reg", "-1"]),
    ("--algorithm fedcir --set algorithm.hidden=big", ["algorithm.hidden must be a whole number, got 'big'"]),
    ("--algorithm fedavg --set algorithm.mu=1", ["'mu'", "it has no fields"]),
    ("--set model.weights=nowhere.pth", ["nowhere.pth"]),
    ("--set server.min_replies=4", ["server.min_replies is 4", "only 3 clients are active"]),
    ("--rounds 0", ["rounds must be at least 1, got 0"]),
    ("--rounds -3", ["rounds must be at least 1, got -3"]),
    ("--local-steps 0", ["local.steps must be at least 1, got 0"]),
    ("--active 99", ["99", "3 clients"]),
    ("--seed -1", ["run.seed", "-1"]),
    ("--rounds many", ["--rounds takes a whole number, got 'many'\n"]),
    ("--rounds 1.5", ["--rounds takes a whole number, got '1.5'\n"]),
    ("--seed x", ["--seed takes a whole number, got 'x'\n"]),
    ("--lr fast", ["--lr takes a number, got 'fast'\n"]),
    ("--lr=0", ["local.lr must be a number above 0, got 0"]),
    ("--batch-size 1", ["local.batch_size must be at least 2, got 1"]),
    ("--resume=yes", ["--resume takes no value\n"]),
    ("own.toml more.toml", ["too many arguments: more.toml; see `fedcir run --help`\n"]),
    ("--debug", ["--debug goes before the command: fedcir --debug run ...\n"]),
    ("-x", ["no option -x; see `fedcir run --help`\n"]),
    ("-o", ["-o takes a value, got none\n"]),
    ("--clients 1", ["partition.clients", "3", "got 1"]),
    ("--clients 1000", ["'ink' has 24 training images", "lower partition.clients", "--clients"]),
    ("--beta nan", ["partition.beta", "nan"]),
    ("--hold-out crayon", ["'crayon'", "ink, pen, wax"]),
    ("--model resnet", ["'resnet'", "resnet18"]),
    ("--device tpu", ["'tpu'", "cpu"]),
    ("--device cpu:x", ["cpu:x"]),
    ("--roundz 3", ["no option --roundz; did you mean --rounds?\n"]),
    ("--rounds", ["--rounds takes a value, got none\n"]),
    ("--algorithm fedcri", ["'fedcri'", "did you mean 'fedcir'?"]),
    ("--algorithm ./missing.py", ["missing.py"]),
    ("--algorithm ./broken.py", ["broken.py", "nothing_of_this_name"]),
    ("--algorithm ./syntax.py", ["syntax.py", "line 1"]),
    ("--algorithm ./empty.py", ["./empty.py", "it defines none"]),
    ("--algorithm ./two.py", ["./two.py", "it defines A, B"]),
    ("--algorithm ./mine.py --set algorithm.nu=1", ["'nu'", "mu"]),
    ("missing.toml", ["missing.toml", "No such file"]),
    ("broken.toml", ["broken.toml", "line 1"]),
    ("latin.toml", ["latin.toml"]),
    ("folder", ["config folder: it is a folder"]),
    ("section.toml", ["[locale]", "did you mean 'local'?"]),
    ("field.toml", ["'learning'", "[local]"]),
    ("typed.toml", ["local.lr must be a number, got 'fast'"]),
    ("flat.toml", ["partition must be a section [partition], got 3"]),
    pytest.param(
        "flat.toml --clients 3",
        ["partition must be a section [partition], got 3"],
    ),
    ("--data-root minute", ["4x4"]),
    ("--set local.batch_size=1", ["batch_size"]),
]


def check_refused(said: Any, named: list[str]) -> None:
    """One line that names what was wrong, exit code 2, and nothing of a parser's or a traceback's."""
    assert said.code == 2
    assert said.out == ""
    assert said.err.startswith("fedcir: ")
    assert said.err.endswith("\n")
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    assert "Usage" not in said.err
    assert "╭" not in said.err
    for name in named:
        assert name in said.err


@pytest.mark.parametrize(("arguments", "named"), REFUSED)
def test_wrong_input_is_refused_in_one_line_before_anything_is_written(
    fedcir: Command, options: list[str], place: Path, arguments: str, named: list[str]
) -> None:
    check_refused(fedcir("run", *options, "--out", "run", *arguments.split()), named)
    assert not (place / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(fedcir: Command, options: list[str], place: Path) -> None:
    check_refused(
        fedcir("run", *options, "--out", "run", "--device", "cuda"), ["'cuda' is not available here: use cpu"]
    )
    assert not (place / "run").exists()


def test_a_dataset_that_needs_a_root_says_so(fedcir: Command, place: Path) -> None:
    check_refused(fedcir("run", "--dataset", "arrays", "--out", "run"), ["'arrays'", "--data-root"])
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["runn"], ["no command 'runn'; did you mean 'run'?\n"]),
        (["reprt"], ["no command 'reprt'; did you mean 'report'?\n"]),
        (["data", "nope"], ["no command 'nope'; choose from list, check, show, prepare, partition, cache\n"]),
        (["report"], ["RUNS is missing: finished runs, or folders of runs; see `fedcir report --help`\n"]),
        (["data", "check"], ["NAME is missing: name of the dataset"]),
        (["--verbos"], ["no option --verbos; did you mean --version?\n"]),
        (["settings", "lokal"], ["no section [lokal]; did you mean 'local'?"]),
        (["settings", "local.stops"], ["[local] has no field 'stops'; did you mean 'steps'?"]),
        (["settings", "algorithm.lambda_align"], ["a field of fedalign, fedcir", "`fedcir algorithms fedalign`"]),
        (["algorithms", "fedavgg"], ["'fedavgg'", "did you mean 'fedavg'?"]),
        (["data", "show", "nope"], ["'nope'", "arrays, camelyon17"]),
        (["data", "show", "arrays"], ["--data-root"]),
        (["compare", "--seeds", "x"], ["--seeds", "'x'"]),
        (["compare", "--seeds", "0,-1"], ["run.seed", "-1"]),
        (["compare", "--algorithms", "fedavg,fedcri"], ["'fedcri'", "did you mean 'fedcir'?"]),
        (["compare", "--algorithms", ""], ["algorithms is empty"]),
    ],
)
def test_wrong_input_to_other_commands_is_refused_in_one_line(
    fedcir: Command, place: Path, arguments: list[str], named: list[str]
) -> None:
    before = sorted(place.rglob("*"))
    check_refused(fedcir(*arguments), named)
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("command", [[], ["data"]])
def test_a_command_without_arguments_shows_its_help(fedcir: Command, command: list[str]) -> None:
    said = fedcir(*command)
    assert said.code in {0, 2}
    assert re.search(r"^ +(run|list) ", said.out + said.err, re.MULTILINE)


def test_a_folder_that_is_not_a_run_is_refused_and_left_as_it_was(
    fedcir: Command, options: list[str], place: Path
) -> None:
    check_refused(fedcir("run", *options, "--out", "folder"), ["folder holds other files and no run: choose another"])
    assert [path.name for path in (place / "folder").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("out", ["file", "file/run", "/proc/nowhere/run"])
def test_a_place_that_cannot_be_written_is_named(fedcir: Command, options: list[str], place: Path, out: str) -> None:
    check_refused(fedcir("run", *options, "--out", out), [out.removesuffix("/run")])
    assert (place / "file").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_named(fedcir: Command, options: list[str], place: Path) -> None:
    (place / "folder").chmod(0o500)
    check_refused(fedcir("run", *options, "--out", "folder/run"), ["folder/run"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [("--roundz 3", "--roundz"), ("--algorithm ./broken.py", "nothing_of_this_name")],
)
def test_a_process_ends_with_code_2_and_one_line(options: list[str], place: Path, arguments: str, named: str) -> None:
    command = [sys.executable, "-m", "fedcir", "run", *options, "--out", "run", *arguments.split()]
    ended = subprocess.run(command, cwd=place, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(rf"fedcir: .*{named}.*\n", ended.stderr)
    assert not (place / "run").exists()


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


COMMANDS = dict(commands(get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_is_whole_and_says_what_each_option_does(fedcir: Command, path: tuple[str, ...]) -> None:
    said = fedcir(*path, "--help")
    assert (said.code, said.err) == (0, "")
    assert "\\" not in said.out
    listed = said.out.partition("Commands:")[2]
    assert "..." not in listed, "its first sentence is too long for the list"
    assert all(param.help for param in COMMANDS[path].params)


def test_defaults_are_shown_in_brackets(fedcir: Command) -> None:
    assert "[default: report.html]" in fedcir("report", "--help").out
    assert "[default: report]" in fedcir("run", "--help").out


def test_the_help_of_reproduce_names_every_table_and_figure() -> None:
    assert re.findall(r"[a-z0-9-]+\d|fig-[a-z-]+", IDS) == sorted(ids(), key=lambda id: (id.startswith("fig"), id))


def test_version_is_printed(fedcir: Command) -> None:
    assert fedcir("--version") == (0, f"fedcir {__version__}\n", "")


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"], ["run", "--nope"], ["--version"]])
def test_help_does_not_wait_for_torch(command: list[str]) -> None:
    script = (
        "import sys, fedcir.cli\n"
        f"sys.argv = ['fedcir', *{command!r}]\n"
        "try:\n    fedcir.cli.main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib'} & sys.modules.keys()\n"
        "print('heavy:', *sorted(heavy))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ended.stdout.endswith("heavy:\n")


def test_run_says_how_it_goes_in_plain_lines_and_prints_a_table(
    fedcir: Command, options: list[str], place: Path
) -> None:
    said = fedcir("run", *options, "--algorithm", "fedavg", "--out", "run")
    assert said.code == 0
    lines = said.err.splitlines()
    assert len(lines) == 3
    for number, line in enumerate(lines, start=1):
        assert re.fullmatch(
            rf"arrays-fedavg-0: round {number}/3  ce \S+ total \S+  acc \d+\.\d%, worst \d+\.\d%  \d+:\d\d left", line
        )
    assert all(char.isprintable() or char == "\n" for char in said.err + said.out)
    assert "fedavg on arrays, test accuracy (%); the best round is picked on test data" in said.out
    assert said.out.endswith("saved in run\n")
    final = RunFolder(place / "run").summary()["final"]
    row = next(line for line in said.out.splitlines() if "last round, 3" in line)
    assert row.split()[3:] == [
        f"{100 * value:.1f}"
        for value in [
            *final["accuracy"].values(),
            final["accuracy_mean"],
            final["accuracy_weighted"],
            final["accuracy_worst"],
        ]
    ]


def test_a_held_out_domain_is_marked_and_kept_out_of_the_mean(fedcir: Command, options: list[str], place: Path) -> None:
    command = ["compare", *options, "--hold-out", "pen", "--algorithms", "fedavg", "--workers", "1", "-o", "both"]
    said = fedcir(*command)
    assert said.code == 0, said.err
    assert all(", unseen " in line for line in said.err.splitlines())
    header, _, row = (place / "both" / "comparison.md").read_text().splitlines()
    assert header.startswith("| method | ink | wax | pen (not trained on) | seen mean | worst | unseen mean |")
    final = RunFolder(place / "both" / "fedavg-0").summary()["final"]
    ink, wax, pen = (100 * final["accuracy"][name] for name in ("ink", "wax", "pen"))
    assert row.startswith(
        f"| fedavg | {ink:.1f} | {wax:.1f} | {pen:.1f} | {(ink + wax) / 2:.1f} | {min(ink, wax):.1f} | {pen:.1f} |"
    )
    said = fedcir("run", *options, "--hold-out", "pen", "--algorithm", "fedavg", "--out", "run")
    assert "pen (not trained on)" in said.out
    assert "seen mean" in said.out
    last = next(line for line in said.out.splitlines() if "last round, 3" in line)
    assert last.split()[-1] == f"{pen:.1f}"


def test_compare_says_what_to_do_next(fedcir: Command, options: list[str], place: Path) -> None:
    said = fedcir("compare", *options, "--algorithms", "fedavg,fedprox", "--workers", "1", "-o", "both")
    assert "at chance level" in said.out  # after three rounds of two steps
    assert "Use " not in said.out
    assert "Try `--seeds 0,1,2`." in said.out


def test_rounds_without_evaluation_are_not_lines(fedcir: Command, options: list[str], place: Path) -> None:
    said = fedcir("run", *options, "--algorithm", "fedavg", "--out", "run", "--eval-every", "2")
    assert [line.split()[2] for line in said.err.splitlines()] == ["2/3", "3/3"]


def test_json_is_the_summary_alone_on_standard_output(fedcir: Command, options: list[str], place: Path) -> None:
    said = fedcir("run", *options, "--algorithm", "fedavg", "--out", "run", "--json")
    assert said.code == 0
    kept = json.loads((place / "run" / "summary.json").read_text())
    del kept["checksum"]
    assert json.loads(said.out) == kept
    assert said.out.count("\n") == 1


def test_quiet_prints_nothing(fedcir: Command, options: list[str], place: Path) -> None:
    said = fedcir("run", *options, "--algorithm", "fedavg", "--out", "run", "--quiet")
    assert said == (0, "", "")
    assert RunFolder(place / "run").finished
    assert fedcir("run", *options, "--algorithm", "fedavg", "--out", "run", "--quiet", "--resume") == (0, "", "")


def test_without_out_a_run_lies_in_runs_by_its_dataset_algorithm_and_seed(
    fedcir: Command, options: list[str], place: Path
) -> None:
    assert fedcir("run", *options, "--algorithm", "fedavg", "--seed", "7", "--quiet").code == 0
    assert RunFolder(place / "runs" / "arrays-fedavg-7").finished


def test_lr_and_batch_size_are_options(fedcir: Command, options: list[str], place: Path) -> None:
    given = ["--lr", "0.5", "--batch-size", "4", "--algorithm", "fedavg"]
    assert fedcir("run", *options, *given, "--out", "run", "--quiet").code == 0
    local = RunFolder(place / "run").config().local
    assert (local.lr, local.batch_size) == (0.5, 4)


def test_an_option_wins_over_the_file_and_set_wins_over_both(fedcir: Command, options: list[str], place: Path) -> None:
    (place / "own.toml").write_text(
        "[server]\nrounds = 9\neval_every = 2\n[local]\nlr = 0.5\n[algorithm]\nname = 'fedcir'\nhidden = 4\n"
    )
    assert fedcir("run", "own.toml", *options, "--out", "run", "--quiet", "--set", "local.steps=1").code == 0
    config = RunFolder(place / "run").config()
    assert (config.server.rounds, config.server.eval_every) == (3, 2)
    assert (config.local.steps, config.local.lr) == (1, 0.5)
    assert config.algorithm.fields["hidden"] == 4


def test_an_own_algorithm_in_a_file_trains(fedcir: Command, options: list[str], place: Path) -> None:
    said = fedcir("run", *options, "--algorithm", "./mine.py", "--set", "algorithm.mu=0.3", "--out", "run")
    assert said.code == 0
    assert "arrays-mine-0: round 3/3" in said.err
    run = RunFolder(place / "run")
    assert run.config().algorithm.fields == {"mu": 0.3}
    assert all(record.losses.keys() == {"ce", "near", "total"} for record in run.records())
    shown = fedcir("algorithms", "./mine.py")
    assert "Weight of the proximal term." in shown.out
    assert "Mine: FedAvg that stays near the global model." in shown.out


@pytest.mark.parametrize("name", ["torch", "json", "fedcir", "typer"])
def test_an_own_algorithm_may_have_any_name(
    fedcir: Command, options: list[str], place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[name]
    monkeypatch.setitem(sys.modules, name, module)  # put back at the end
    (place / f"{name}.py").write_text(MINE)
    said = fedcir("run", *options, "--rounds", "1", "--algorithm", f"./{name}.py", "--out", "run", "--quiet")
    assert sys.modules[name] is module
    assert said == (0, "", "")


def test_algorithms_lists_every_method_with_its_idea(fedcir: Command) -> None:
    said = fedcir("algorithms")
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines()[3:] if line.strip()] == algorithms.names()
    listed = json.loads(fedcir("algorithms", "--json").out)
    assert [each["name"] for each in listed] == algorithms.names()
    assert all(each["idea"] and each["citation"] for each in listed)


def test_an_algorithm_is_shown_with_every_field_its_default_and_its_meaning(fedcir: Command) -> None:
    said = fedcir("algorithms", "fedcir")
    assert said.code == 0
    assert "https://arxiv.org/abs/2308.15786" in said.out
    assert re.search(r"^up: +model [0-9,]+ bytes$", said.out, re.MULTILINE)
    assert re.search(r"lambda_align +number, 0 to 1,000,000 +1e-06 +Weight of the KL", said.out)
    shown = json.loads(fedcir("algorithms", "fedcir", "--json").out)
    assert all(field["doc"] for field in shown["fields"])
    assert shown["up"].keys() == {"model"}
    assert shown["down"].keys() == {"model", "generator", "gaussians"}


def test_data_list_names_the_datasets(fedcir: Command) -> None:
    said = fedcir("data", "list")
    assert said.code == 0
    assert json.loads(fedcir("data", "list", "--json").out).keys() >= {"minidigits", "arrays"}
    assert "minidigits" in said.out
    assert "arrays" in said.out


def test_data_show_draws_a_picture_and_counts_the_samples(fedcir: Command, data_root: Path, place: Path) -> None:
    said = fedcir("data", "show", "arrays", "--data-root", data_root, "-o", "sheet.png")
    assert said.code == 0
    assert "3 classes, 8x8 pixels" in said.out
    assert re.search(r"pen +24 +12", said.out)
    with Image.open(place / "sheet.png") as sheet:
        assert sheet.format == "PNG"
        assert len(sheet.getcolors(sheet.width * sheet.height)) > 20


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != RunFolder.LOCK
    }


def test_compare_trains_what_is_not_finished_and_puts_all_side_by_side(
    fedcir: Command, tiny: Callable[..., Any], train: Callable[..., Path], options: list[str], place: Path
) -> None:
    """Two methods and two seeds, of which seed 0 was trained before."""
    both, runs = place / "both", ["fedavg-0", "fedavg-1", "fedcir-0", "fedcir-1"]
    train(tiny("fedavg", "server.rounds=2"), both / "fedavg-0")
    train(tiny("fedcir", "server.rounds=2", "algorithm.hidden=256"), both / "fedcir-0")
    before = content(both)
    command = ["compare", *options, "--algorithms", "fedavg,fedcir", "--seeds", "0,1", "--workers", "1", "-o", "both"]
    check_refused(fedcir(*command, "--rounds", "2"), ["both/fedavg-0 already holds a run", "resume it"])
    said = fedcir(*command, "--rounds", "2", "--resume")
    assert said.code == 0
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
            assert cell in said.out
    assert "test accuracy after the last round (%), 2 seeds" in said.out
    assert len(said.err.splitlines()) == 8
    assert "fedcir-1: round 2/2" in said.err


def test_compare_resumes_a_run_whose_last_rounds_must_be_done_again(
    fedcir: Command, tiny: Callable[..., Any], train: Callable[..., Path], options: list[str], place: Path
) -> None:
    """As a kill leaves it: five rounds are recorded, two of them after the last checkpoint."""
    settings = ("server.rounds=6", "server.checkpoint_every=3")
    out = train(tiny("fedavg", *settings), place / "both" / "fedavg-0", until=5)
    (out / "checkpoint" / "round-000005.safetensors").unlink()
    rounds = out / "rounds.jsonl"
    rounds.write_text(re.sub(r'("write": )[0-9.e-]+', r"\g<1>1.0", rounds.read_text()))  # other times, another length
    more = [part for setting in settings for part in ("--set", setting)]
    said = fedcir("compare", *options, *more, "--algorithms", "fedavg", "--resume", "-o", "both")
    assert said.code == 0
    assert RunFolder(out).finished
    assert said.err.splitlines()[-1].startswith("fedavg-0: round 6/6")


def test_compare_refuses_a_number_of_workers_below_1(fedcir: Command, options: list[str], place: Path) -> None:
    check_refused(fedcir("compare", *options, "--algorithms", "fedavg", "--workers", "-1"), ["workers", "-1"])


def test_compare_takes_a_field_that_only_some_methods_have(fedcir: Command, options: list[str], place: Path) -> None:
    setting = ["--rounds", "1", "--set", "algorithms.fedcir.hidden=8"]
    said = fedcir("compare", *options, *setting, "--algorithms", "fedavg,fedcir", "-o", "both", "--workers", "1")
    assert said.code == 0
