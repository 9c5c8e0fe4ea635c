"""Wrong input: one line that names the value, exit code 2, and nothing is written."""

import os
import re
from pathlib import Path

import pytest
import torch
from user_files import Command, check_refused

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
    ("--set model.train=layer9", ["no part 'layer9'; choose from convs.0 to convs.2, norms.0 to norms.2, fc, head"]),
    ("--algorithm fedcirone --set model.train=fc", ["clients of fedcirone take no steps"]),
    ("--algorithm fedbn --set model.train=fc", ["fedbn keeps BatchNorm layers that train"]),
    ("--algorithm fedrep --set model.train=head", ["fedrep shares the encoder, but this one is frozen"]),
    ("--set model.adapter=dora", ["model.adapter", "did you mean 'lora'?"]),
    ("--set model.adapter=lora --set model.adapter_targets=norms.0", ["'norms.0'", "choose from convs.0, "]),
    ("--set model.adapter_rank=4", ["set model.adapter=lora too"]),
    ("--set local.optimizer=adamm", ["local.optimizer", "'adamm'", "did you mean 'adam'?"]),
    ("--set local.clip_norm=0", ["local.clip_norm must be a number above 0"]),
    ("--set local.warmup=-1", ["local.warmup must be at least 0"]),
    ("--set server.patience=3", ["server.patience=3", "set data.val_fraction=0.1"]),
    ("--set server.min_replies=4", ["server.min_replies is 4, above 3 active clients"]),
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


@pytest.mark.parametrize(("arguments", "named"), REFUSED)
def test_wrong_input_is_refused_in_one_line_before_anything_is_written(
    fedcir: Command, options: list[str], workspace: Path, arguments: str, named: list[str]
) -> None:
    check_refused(fedcir("run", *options, "--out", "run", *arguments.split()), named)
    assert not (workspace / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(fedcir: Command, options: list[str], workspace: Path) -> None:
    check_refused(
        fedcir("run", *options, "--out", "run", "--device", "cuda"), ["'cuda' is not available here: use cpu"]
    )
    assert not (workspace / "run").exists()


def test_a_dataset_that_needs_a_root_says_so(fedcir: Command, workspace: Path) -> None:
    check_refused(fedcir("run", "--dataset", "arrays", "--out", "run"), ["'arrays'", "--data-root"])
    assert not (workspace / "run").exists()


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
    fedcir: Command, workspace: Path, arguments: list[str], named: list[str]
) -> None:
    before = sorted(workspace.rglob("*"))
    check_refused(fedcir(*arguments), named)
    assert sorted(workspace.rglob("*")) == before


@pytest.mark.parametrize("command", [[], ["data"]])
def test_a_command_without_arguments_shows_its_help(fedcir: Command, command: list[str]) -> None:
    output = fedcir(*command)
    assert output.code in {0, 2}
    assert re.search(r"^ +(run|list) ", output.out + output.err, re.MULTILINE)


def test_a_folder_that_is_not_a_run_is_refused_and_left_as_it_was(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    check_refused(fedcir("run", *options, "--out", "folder"), ["folder holds other files and no run: choose another"])
    assert [path.name for path in (workspace / "folder").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("out", ["file", "file/run", "/proc/nowhere/run"])
def test_a_place_that_cannot_be_written_is_named(
    fedcir: Command, options: list[str], workspace: Path, out: str
) -> None:
    check_refused(fedcir("run", *options, "--out", out), [out.removesuffix("/run")])
    assert (workspace / "file").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_named(fedcir: Command, options: list[str], workspace: Path) -> None:
    (workspace / "folder").chmod(0o500)
    check_refused(fedcir("run", *options, "--out", "folder/run"), ["folder/run"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [("--roundz 3", "--roundz"), ("--algorithm ./broken.py", "nothing_of_this_name")],
)
def test_a_process_ends_with_code_2_and_one_line(
    fork_fedcir: Command, options: list[str], workspace: Path, arguments: str, named: str
) -> None:
    ended = fork_fedcir("run", *options, "--out", "run", *arguments.split(), cwd=workspace)
    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(rf"fedcir: .*{named}.*\n", ended.err)
    assert not (workspace / "run").exists()
