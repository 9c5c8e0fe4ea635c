"""The commands that README and docs show: each is run on small data, or named here with what it needs."""

import itertools
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.main import get_command

from fedcir.cli import app
from fedcir.config import Config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = re.compile(r"^\$ (fedcir (?:.*\\\n)*.*)$", re.MULTILINE)

NOT_RUN = {
    "deploy check": "needs a server; tests/flower/test_site_check.py has one",
    "deploy local": "takes a minute; tests/flower/test_cli_deploy.py runs it",
    "data cache --clear": "would empty the cache of all tests",
    "reproduce fig-divergence --scale paper": "takes days",
    "reproduce table1 --scale paper": "takes days",
    "reproduce table1 --dataset pacs --data-root DIR": "takes an hour; its plan and its smoke scale are run",
    "reproduce table1 --scale smoke": "takes a minute; tests/experiments run it",
    "run --model resnet18 --set model.weights=lite0.pth": "shows an error; tests/models/test_weights.py has it",
    "algorithms ./prox.py": "tests/test_readme.py checks that method",
    "run --algorithm ./prox.py": "tests/test_readme.py checks that method",
    "compare --algorithms fedavg,fedcir,./prox.py": "tests/test_readme.py checks that method",
    "worth runs/one": "docs/worth.md makes such runs",
    "worth runs/pacs12": "takes a minute; the four sites above are measured",
    "recommend": "takes minutes; tests/experiments/test_recommendation.py runs it",
}
SMALL = {"--rounds": "1", "--local-steps": "1", "--batch-size": "4", "--image-size": "16", "--bootstrap": "10"}
"""Options that make a command short, where it has them."""
PACS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
STYLES = ("art_painting", "cartoon", "photo", "sketch")
OFFICE = ("back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug")
OFFICE += ("projector",)


def _lines(page: Path) -> list[list[str]]:
    """The words of each command of a page, without `fedcir`."""
    return [
        shlex.split(line.replace("\\\n", " "), comments=True)[1:] for line in SHOWN.findall(page.read_text("utf-8"))
    ]


def _command(words: list[str]) -> tuple[object, set[str]]:
    command = get_command(app)
    for word in words:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]  # type: ignore[attr-defined]
    return command, {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


WITH_COMMANDS = [page for page in PAGES if _lines(page)]
as_named = pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)


@as_named
def test_every_option_of_a_command_in_the_docs_exists(page: Path) -> None:
    for words in _lines(page):
        _, known = _command(words)
        assert {word for word in words if word.startswith("-")} <= known, words


def test_every_command_that_is_not_run_is_in_the_docs() -> None:
    shown = [" ".join(words) for page in WITH_COMMANDS for words in _lines(page)]
    for start in NOT_RUN:
        assert any(line.startswith(start) for line in shown), start


def _images(root: Path, domains: tuple[str, ...], classes: tuple[str, ...], count: int) -> None:
    rng = np.random.default_rng(0)
    for number, domain in enumerate(domains):
        for label, name in enumerate(classes):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for image in range(count):
                pixels = rng.integers(0, 90 + 40 * number, (16, 16, 3))
                pixels[2 * label % 14 : 2 * label % 14 + 3] += 80
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{name}-{number}-{image}.png")


def _write_page_examples(folder: Path) -> None:
    """Save the example of every page under the name that the page tells its reader to save it as."""
    for page in PAGES:
        text = page.read_text("utf-8")
        example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
        name = re.search(r"^Save it as `(\w+\.py)`", text, re.MULTILINE)
        if example and name:
            (folder / name[1]).write_text(example[1], encoding="utf-8")


@pytest.fixture
def workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Config], train: Callable[..., Path]
) -> Path:
    """A folder in which the names that the docs use are there."""
    _images(tmp_path / "pacs", STYLES, PACS, 10)
    _images(tmp_path / "office", ("amazon", "caltech", "dslr", "webcam"), OFFICE, 10)
    _images(tmp_path / "photos", ("clinic", "hospital", "practice"), ("dog", "horse"), 25)
    table = ["path,label,site"]
    for image in sorted((tmp_path / "photos").rglob("*.png")):
        table.append(f"{image.relative_to(tmp_path / 'photos')},{image.parent.name},{image.parts[-3]}")
    for file in ("labels.csv", "LABELS.csv"):
        (tmp_path / "photos" / file).write_text("\n".join(table), encoding="utf-8")
    (tmp_path / "photos/LABELS.csv").rename(tmp_path / "LABELS.csv")
    data = '[data]\nname = "folders"\nroot = "photos"\nval_fraction = 0.2\n'
    for name, more in (
        ("fedcir.toml", ""),
        ("settings.toml", ""),
        ("scans.toml", '[model]\nname = "./mine.py:small"\n'),
    ):
        (tmp_path / name).write_text(data + more, encoding="utf-8")
    for name in ("photo/dog/056_0001.jpg", "photo/dog/056_0002.jpg", "sketch/house/8801.jpg"):
        Image.new("RGB", (16, 16), (90, 80, len(name))).save(tmp_path / "pacs" / name)
    small = "from torch import nn\ndef small(width=8, dropout_prob=0.0):\n    return nn.Conv2d(3, width, 3)\n"
    (tmp_path / "mine.py").write_text(small, encoding="utf-8")
    _write_page_examples(tmp_path)
    (tmp_path / "images").mkdir()
    for index, image in enumerate(sorted((tmp_path / "photos").rglob("*.png"))):
        shutil.copy(image, tmp_path / "images" / f"{image.parts[-3]}_{image.parent.name}_{index}.png")
    (tmp_path / "NEW_IMAGES").symlink_to(tmp_path / "photos" / "clinic" / "dog")
    (tmp_path / "empty.jpg").touch()
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    for name in ("fedavg", "fedcir"):
        config = tiny(name, "data.name=folders", "data.root=photos", "data.image_size=16", "data.val_fraction=0.2")
        train(config, runs / "both" / f"{name}-0")
    for name in ("a", "office-caltech-10-fedavg-0"):
        shutil.copytree(runs / "both/fedavg-0", runs / name)
    for name in ("b", "office-caltech-10-fedcir-0"):
        shutil.copytree(runs / "both/fedcir-0", runs / name)
    return tmp_path


def _here(words: list[str]) -> list[str]:
    """The same command on the data of this place."""
    _, known = _command(words)
    office = "office-caltech-10" in words
    root = "office" if office else "pacs" if "pacs" in words else "photos"
    names = {"DIR": root, "DATA": root, "PACS": "pacs", "ALL": "."}
    words = [names.get(word, word) for word in words]
    for option, value in SMALL.items():
        if option in known and not (option == "--image-size" and any(word.startswith("runs/") for word in words[:2])):
            words += [option, value]
    if "--force" in known:
        words += ["--force"]
    return words


@as_named
@pytest.mark.slow
def test_the_commands_of_a_page_run(page: Path, workspace: Path, fedcir: Callable[..., tuple[int, str, str]]) -> None:
    for words in _lines(page):
        line = " ".join(words)
        if any(line.startswith(start) for start in NOT_RUN):
            continue
        for option, value in itertools.pairwise(words):
            if option == "--out" and "--resume" not in words and Path(value).is_dir():
                shutil.rmtree(value)
        code, out, err = fedcir(*_here(words))
        assert code == (2 if "empty.jpg" in words else 0), f"fedcir {line}: {out[-300:]} {err[-300:]}"
