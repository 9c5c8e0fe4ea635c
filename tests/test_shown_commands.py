"""The commands that README and docs show: each is run on small data, or named here with what it needs."""

import importlib.util
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
    "worth runs/sites": "needs a run of deploy local; tests/flower/test_stored_sums.py has one",
    "worth runs/office": "needs a file of each site; tests/courier/test_courier.py makes them",
    "worth runs/pacs12": "takes a minute; the four sites above are measured",
    "run --model dinov2-small": "needs a wheel; tests/test_wheel.py builds and installs one",
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


def _write_other_data(folder: Path) -> None:
    """Write tables, arrays, masks, images with findings, and a small network of transformers where it is installed."""
    rng = np.random.default_rng(0)
    for name in ("tables", "heart", "arrays", "xrays/scans"):
        (folder / name).mkdir(parents=True)
    findings = ["path,site,patient,effusion,oedema,age"]
    for number, site in enumerate(("north", "south")):
        tables, hearts = ["age,city,ill,score,event,days"], ["age,chol,cp,num"]
        for row in range(40):
            age = rng.normal(50 + 5 * number, 9)
            ill, days = int(rng.random() < 0.5), rng.exponential(300)
            tables.append(f"{age:.1f},{('rome', 'oslo')[row % 2]},{ill},{age + ill:.2f},{row % 3 > 0:d},{days:.1f}")
            hearts.append(f"{age:.1f},{rng.normal(240, 50):.0f},{row % 4 + 1},{ill * (row % 3 + 1)}")
            name = f"scans/{site}-{row}.png"
            Image.fromarray(rng.integers(0, 255, (16, 16), dtype=np.uint8)).save(folder / "xrays" / name)
            findings.append(f"{name},{site},{site}{row},{row % 2},{row // 2 % 2},{age:.1f}")
        (folder / "tables" / f"{site}.csv").write_text("\n".join(tables))
        (folder / "heart" / f"{site}.csv").write_text("\n".join(hearts))
        labels = np.arange(40) % 2
        parts = {part: rng.normal(size=(40, 3, 5)) + labels[:, None, None] for part in ("x_train", "x_test")}
        np.savez(folder / "arrays" / f"{site}.npz", **parts, y_train=labels, y_test=labels)
    (folder / "xrays/labels.csv").write_text("\n".join(findings))
    (folder / "new.csv").write_text("age,chol,cp,patient\n61,250,4,A-17\n44,,2,A-18\n")
    for site in ("a", "b"):
        for kind in ("images", "masks"):
            (folder / "masks" / site / kind).mkdir(parents=True)
        for number in range(10):
            mask = np.zeros((16, 16), np.uint8)
            mask[4:12, number % 8 : number % 8 + 8] = 1
            Image.fromarray(mask).save(folder / "masks" / site / "masks" / f"{number}.png")
            image = 200 * mask + rng.integers(0, 50, (16, 16), dtype=np.uint8)
            Image.fromarray(image).save(folder / "masks" / site / "images" / f"{number}.png")
    if importlib.util.find_spec("transformers") is not None:
        import transformers

        sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        network = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, image_size=16, patch_size=8))
        network.save_pretrained(folder / "dinov2-small")


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
    shutil.copytree(tmp_path / "photos", tmp_path / "labelled")
    for file in ("labelled/labels.csv", "LABELS.csv"):
        (tmp_path / file).write_text("\n".join(table), encoding="utf-8")
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
    _write_other_data(tmp_path)
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
    root = "office" if office else "pacs" if "pacs" in words else "labelled" if "table" in words else "photos"
    names = {"DIR": root, "DATA": root, "PACS": "pacs", "ALL": "."}
    names |= {"XRAYS": "xrays", "TABLES": "tables", "ARRAYS": "arrays", "MASKS": "masks"}
    words = [re.sub(r"^[A-Z]+(?=/|$)", lambda match: names.get(match[0], match[0]), word) for word in words]
    if words[0] == "tune" and "--resume" in words:
        return words  # a search goes on with its own settings
    for option, value in SMALL.items():
        has_images = not {"csv", "ARRAYS", "arrays", "tables", "heart", "fedcir.toml"}.intersection(words)
        if option == "--image-size" and (any(word.startswith("runs/") for word in words[:2]) or not has_images):
            continue
        if option in known and option not in words:
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
