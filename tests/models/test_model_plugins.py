"""Models by file and by entry point: the example of docs/add-a-model.md works, and mistakes are named."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcir.config import ModelConfig
from fedcir.conformance import Failure, check_model
from fedcir.errors import InputError
from fedcir.models.pretrained import build_foreign

PAGE = Path(__file__).parents[2] / "docs" / "add-a-model.md"
OPTIONS = ["--rounds", 1, "--local-steps", 1, "--device", "cpu", "--quiet", "--out", "run"]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example of the page, in the working directory."""
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    path = tmp_path / "patches.py"
    path.write_text(code[1], encoding="utf-8")
    return path


@pytest.fixture
def installed(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as an installed distribution with an entry point."""
    (example.parent / "patches-1.0.dist-info").mkdir()
    (example.parent / "patches-1.0.dist-info/METADATA").write_text("Name: patches\nVersion: 1.0\n")
    entry = "[fedcir.models]\npatch-encoder = patches:PatchEncoder\nbroken = patches:Nothing\n"
    (example.parent / "patches-1.0.dist-info/entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(example.parent))


@pytest.mark.usefixtures("example")
def test_the_model_of_the_page_conforms_and_trains(fedcir: Callable[..., Any]) -> None:
    check_model("./patches.py")
    check_model("./patches.py", width=8)
    assert fedcir("run", "--model", "./patches.py", *OPTIONS).code == 0
    assert Path("run/summary.json").is_file()
    refused = fedcir("run", "--resume", "--rounds", 2, "--out", "run")
    assert (refused.code, "is code of its own" in refused.err) == (2, True)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_a_model_by_its_name(fedcir: Callable[..., Any]) -> None:
    check_model("patch-encoder")
    assert fedcir("run", "--model", "patch-encoder", *OPTIONS).code == 0
    with pytest.raises(InputError, match=r"did you mean 'patch-encoder'"):
        ModelConfig(name="patch-encodr")
    with pytest.raises(InputError, match=r"model 'broken' .patches:Nothing. cannot be loaded"):
        build_foreign(ModelConfig(name="broken"))


def test_a_file_with_two_callables_must_name_one(example: Path) -> None:
    example.write_text("from torch import nn\ndef a(): return nn.Flatten()\ndef b(): return nn.Flatten()\n")
    with pytest.raises(InputError, match=r"must define one class or function .* but it defines a, b"):
        check_model("./patches.py")


@pytest.mark.parametrize(
    ("forward", "fault"),
    [
        ("self.c(x) - self.c(x).mean(0)", "features depend on the other images of the batch"),
        ("self.c(x) / 0", "the features of finite images are not finite"),
        ("self.c(x).detach()", "no gradient reaches the encoder"),
    ],
)
def test_a_model_that_breaks_a_guarantee_is_named(forward: str, fault: str, example: Path) -> None:
    body = "def __init__(self):\n        super().__init__()\n        self.c = nn.Conv2d(3, 4, 3)\n"
    code = (
        f"from torch import nn\nclass Net(nn.Module):\n    {body}    def forward(self, x):\n        return {forward}\n"
    )
    example.write_text(code)
    with pytest.raises(Failure, match=fault):
        check_model("./patches.py")
