"""From Python: what the commands do, as functions that return values."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedcir
from fedcir.config import ConfigRequest
from fedcir.experiments.comparison import Comparison

Command = Callable[..., Any]
SOURCE = Path(fedcir.__file__).parent

FAULTY = '''"""Faulty: it raises."""

from dataclasses import dataclass

import fedcir


@dataclass(frozen=True)
class Faulty(fedcir.FedAvg):
    """Nobody, 2024. https://example.org"""

    def local_loss(self, modules, x, y, ctx):
        raise RuntimeError("it was never going to work")
'''


pytestmark = pytest.mark.usefixtures("fast_processes")


@pytest.fixture(scope="session")
def keywords(data_root: Path) -> dict[str, Any]:
    """The fixture `options`, as keywords."""
    given: dict[str, Any] = {"dataset": "arrays", "data_root": data_root, "local_steps": 2, "batch_size": 8}
    return {**given, "device": "cpu", "set": {"model.width": 2}}


@pytest.fixture(scope="module")
def compared(
    fast_processes: None, keywords: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Comparison, list[str]]:
    """A comparison of two methods and one that fails, and the events on the way."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "faulty.py").write_text(FAULTY)
    events: list[str] = []
    comparison = fedcir.compare(
        algorithms=["fedavg", "fedprox", folder / "faulty.py"],
        rounds=2,
        out=folder / "all",
        on_progress=lambda step: events.append(step.event),
        **keywords,
    )
    return comparison, events


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "lock")


def test_a_comparison_is_a_value(compared: tuple[Comparison, list[str]]) -> None:
    comparison, events = compared
    assert [method.algorithm for method in comparison.methods] == ["fedavg", "fedprox"]
    assert {name: list(by_seed) for name, by_seed in comparison.runs.items()} == {"fedavg": [0], "fedprox": [0]}
    final = comparison.runs["fedprox"][0].final
    row = comparison.to_rows()[1]
    assert (row["method"], row["mean"], row["ink"]) == ("fedprox", final["accuracy_mean"], final["accuracy"]["ink"])
    assert comparison.table()[0][0] == "method"
    assert (events.count("begun"), events.count("ended"), events.count("failed")) == (3, 2, 1)


def test_a_run_that_fails_is_a_value_and_not_an_error(compared: tuple[Comparison, list[str]]) -> None:
    comparison, _ = compared
    assert list(comparison.failures) == ["faulty-0"]
    assert "it was never going to work" in comparison.failures["faulty-0"]
    assert comparison.failed.startswith("1 of 3 runs failed, resume to try them again: faulty-0: ")


def test_the_command_leaves_the_same_files_as_the_function(
    fedcir: Command, options: list[str], compared: tuple[Comparison, list[str]], tmp_path: Path
) -> None:
    """And a run that failed ends it with 1."""
    comparison, _ = compared
    methods = f"fedavg,fedprox,{comparison.out.parent / 'faulty.py'}"
    output = fedcir("compare", *options, "--report", "--rounds", 2, "--algorithms", methods, "-o", tmp_path / "all")
    assert output.code == 1
    assert output.err.splitlines()[-1].startswith("fedcir: 1 of 3 runs failed, resume to try them again: faulty-0: ")
    assert files(tmp_path / "all") == files(comparison.out)
    for name in ("comparison.csv", "comparison.json", "comparison.md", "fedprox-0/model.safetensors"):
        assert (tmp_path / "all" / name).read_bytes() == (comparison.out / name).read_bytes()


def test_a_comparison_whose_runs_all_fail_is_a_run_error(keywords: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    with pytest.raises(fedcir.RunError, match=r"1 of 1 runs failed.*it was never going to work"):
        fedcir.compare(algorithms=[tmp_path / "faulty.py"], rounds=1, out=tmp_path / "all", **keywords)


def test_a_report_and_a_diagnosis_of_runs_are_values(compared: tuple[Comparison, list[str]], tmp_path: Path) -> None:
    comparison, _ = compared
    runs = [comparison.out / f"{name}-0" for name in ("fedavg", "fedprox")]
    page = fedcir.report(runs, out=tmp_path / "page.html", samples=12)
    assert (page.path.read_text().startswith("<!"), page.notes) == (True, ())
    diagnosed = fedcir.diagnose(runs, samples=12, out=tmp_path / "two.png")
    assert [result.name for result in diagnosed.diagnoses] == ["fedavg-0", "fedprox-0"]
    assert diagnosed.verdict
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(fedcir.InputError, match="leave dataset out"):
        fedcir.diagnose(runs, dataset="arrays", out=None)


def test_a_diagnosis_of_data_needs_no_run_and_no_picture(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    diagnosed = fedcir.diagnose(dataset="arrays", data_root=data_root, samples=12, out=None)
    assert (diagnosed.diagnoses[0].domains, diagnosed.picture) == (["ink", "pen", "wax"], None)
    assert diagnosed.to_rows()[0]["verdict"] == diagnosed.verdict
    assert not list(tmp_path.iterdir())


def test_a_table_of_the_paper_is_a_value(keywords: dict[str, Any], tmp_path: Path) -> None:
    made = fedcir.reproduce("fig-convergence", scale="smoke", seeds=[0], out=tmp_path / "out", report=False, **keywords)
    assert list(made.runs) == ["arrays-fedavg-0", "arrays-fedcir-0"]
    assert made.outcome.numbers
    assert not made.failures
    assert {"fig-convergence.csv", "fig-convergence.png"} <= set(files(tmp_path / "out"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"datset": "arrays"}, "no option 'datset'; did you mean 'dataset'?"),
        ({"algorithms": "fedavg"}, "algorithms takes a list of names, got 'fedavg'"),
        ({"seeds": [0, 0]}, "seeds names 0 twice"),
        ({"seeds": [0.5]}, "seeds takes whole numbers"),
        ({"target": 70}, "target must be between 0 and 1 for accuracy, got 70"),
        ({"set": "local.lr=1"}, "set takes a dict or a list of assignments"),
        ({"set": {"lr": 1}}, "set takes section.field=value, got 'lr=1'"),
    ],
)
def test_wrong_keywords_are_refused_before_anything_is_written(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fedcir.InputError, match=re.escape(message)):
        fedcir.compare(**given)
    assert not list(tmp_path.iterdir())


def test_assignments_are_a_dict_or_a_list() -> None:
    one = ConfigRequest.from_options({"rounds": 3}, set={"local.lr": 0.5, "algorithms.fedcir.latent": 4}).tables()
    assert one == ConfigRequest.from_options({"rounds": 3}, set=["local.lr=0.5", "algorithms.fedcir.latent=4"]).tables()


def test_errors_are_a_family_of_two() -> None:
    assert issubclass(fedcir.InputError, fedcir.FedcirError)
    assert issubclass(fedcir.InputError, ValueError)
    assert issubclass(fedcir.RunError, fedcir.FedcirError)
    assert issubclass(fedcir.RunError, RuntimeError)


def test_a_run_error_ends_the_command_with_1_and_an_option_is_named_behind_its_setting(
    fedcir: Command, options: list[str], tmp_path: Path
) -> None:
    output = fedcir("run", *options, "--algorithm", "fedavg", "--lr", 1000, "--workers", 1, "-o", tmp_path / "run")
    assert output.code == 1
    assert "replies are usable" in output.err.splitlines()[-1]
    assert output.err.endswith("(--lr)\n")


PACKAGES = ["config", "tasks", "models", "algorithms", "data", "client", "server", "runtime", "runs", "inference"]


@pytest.mark.parametrize("package", [*PACKAGES, "analysis", "reporting", "experiments"])
def test_errors_of_the_package_name_no_option_of_the_command_line(package: str) -> None:
    for file in (SOURCE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise):
                texts = [item.value for item in ast.walk(node) if isinstance(item, ast.Constant)]
                plain = [re.sub("`fedcir [^`]*`", "", str(text)) for text in texts]  # a command that helps
                assert not [text for text in plain if re.search(r"--[a-z]", text)], f"{file}, line {node.lineno}"
