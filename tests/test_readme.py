"""What the README shows is what happens."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.main import get_command

import fedcir
from fedcir.algorithms import find_algorithm
from fedcir.cli import app
from fedcir.conformance import check_algorithm

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")
API = (README.parent / "docs" / "api.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_example_of_fedcir_train_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(PYTHON[0], "README.md", "exec"), names)
    result = names["result"]
    assert result.summary["final"]["accuracy_mean"] > 0.9  # type: ignore[attr-defined]
    assert "client-0" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_a_comparison_in_python_runs_and_plots(
    fast_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    example = re.findall(r"```python\n(.*?)```", API, re.DOTALL)[1]
    exec(compile(example, "api.md", "exec"), {"__name__": "example"})
    assert "fedprox" in capsys.readouterr().out
    assert (tmp_path / "accuracy.png").stat().st_size > 0


def test_the_example_of_training_in_python_stops_in_order_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (README.parent / "docs" / "start.md").read_text(encoding="utf-8")
    example = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "on_round" in code)
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(example, "start.md", "exec"), names)
    run = fedcir.load_run("runs/python")
    assert 1 < len(run.records) < 50
    assert run.records[-1].accuracy_mean >= 0.9 > run.records[-2].accuracy_mean
    assert run.final["accuracy_mean"] == run.records[-1].accuracy_mean
    assert Path("python.html").is_file()
    assert names["result"].summary["final"]["rmse_mean"] < 10  # type: ignore[attr-defined]


def test_the_example_of_a_method_gives_every_guarantee(tmp_path: Path) -> None:
    imports = (
        "from dataclasses import dataclass\nimport torch.nn.functional as F\nfrom fedcir import Algorithm, Losses\n"
    )
    (tmp_path / "smooth.py").write_text(imports + PYTHON[1], encoding="utf-8")
    check_algorithm(find_algorithm(str(tmp_path / "smooth.py"))())


def test_the_readme_has_at_most_180_lines() -> None:
    assert len(TEXT.splitlines()) <= 180


def test_every_command_is_in_the_docs() -> None:
    page = (README.parent / "docs" / "commands.md").read_text(encoding="utf-8")
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for path in [f"{name} {sub}" for sub in getattr(command, "commands", {})] or [name]:
            assert f"## fedcir {path}\n" in page, f"`fedcir {path}` is not in docs/commands.md"


def test_every_file_that_the_readme_links_to_is_there() -> None:
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        if not target.startswith("http"):
            assert (README.parent / target).exists(), target


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^\$ (fedcir .*?)(?:\s+#.*)?$", TEXT, re.MULTILINE))))
def test_every_option_in_the_readme_exists(line: str) -> None:
    words = line.split()[1:]
    command = get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


def test_fedprox_as_the_docs_add_it_is_the_one_that_is_here(tmp_path: Path) -> None:
    page = (README.parent / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "prox.py").write_text(code, encoding="utf-8")
    theirs, ours = find_algorithm(str(tmp_path / "prox.py"))(mu=0.5), find_algorithm("fedprox")(mu=0.5)
    check_algorithm(theirs)
    labels = torch.arange(12) % 3
    sites = [(TensorDataset(torch.randn(12, 4) + i, labels), TensorDataset(torch.randn(12, 4), labels)) for i in (0, 1)]
    first, second = (
        fedcir.train(sites, encoder=nn.Identity(), num_classes=3, algorithm=item, rounds=2, local_steps=3).model
        for item in (theirs, ours)
    )
    torch.testing.assert_close(first.state_dict(), second.state_dict())
