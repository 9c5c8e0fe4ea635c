"""Names of domains, classes and files that hold escape sequences: none of them reaches the terminal."""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.progress import Progress

from fedcir.cli.application import escape_output, get_raw_stream
from fedcir.cli.progress import PlainColumn, make_console
from fedcir.inference.predictor import Predictor
from fedcir.text import CONTROLS, escape_controls, escape_line, escape_markdown, format_code

Said = tuple[int, str, str]

DOMAINS = ("\x1b[31mred\x1b]0;title\x07", "pen\r\x9b2J")
CLASSES = ("cat\x1b[2J", "dog\u202egod")
FILE = "\x1b]8;;x\x07{}\r.png"
RUN = "--rounds 1 --local-steps 1 --batch-size 4 --image-size 8 --device cpu --model cnn --workers 1"
RUN += " --set model.width=2 --set data.test_fraction=0.5"
QUICK = ("run", "refused", "missing", "evaluate", "predict", "predict json", "export", "data check", "wrong option")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains of two classes, all with hostile names."""
    root = tmp_path_factory.mktemp("hostile") / "data\x1b[5m"
    noise = np.random.default_rng(0).integers(0, 256, (2, 2, 12, 8, 8, 3), dtype=np.uint8)
    for d, domain in enumerate(DOMAINS):
        for c, label in enumerate(CLASSES):
            (root / domain / label).mkdir(parents=True)
            for n, image in enumerate(noise[d, c]):
                Image.fromarray(image).save(root / domain / label / FILE.format(n))
    (root / DOMAINS[0] / CLASSES[0] / FILE.format("broken")).write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def good(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without the broken file."""
    good = tmp_path_factory.mktemp("good") / "data\x1b[5m"
    shutil.copytree(root, good, ignore=lambda _, names: [name for name in names if "broken" in name])
    return good


def raw(message: Said) -> set[str]:
    """Characters in what was printed that a terminal would obey, in hexadecimal."""
    return {f"{ord(result):x}" for result in CONTROLS.findall(message[1] + message[2])}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow, id="every command")])
def test_no_command_sends_escape_sequences_of_names_to_the_terminal(
    every: bool, root: Path, good: Path, fedcir: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, settings = ["--dataset", "folders", "--data-root", good], RUN.split()
    out = tmp_path / "run\x1b[7m"
    image, broken = (folder / DOMAINS[0] / CLASSES[0] / FILE.format(n) for folder, n in ((good, "1"), (root, "broken")))
    commands: dict[str, list[object]] = {
        "run": ["run", *data, *settings, "--no-report", "--algorithm", "fedavg", "--out", out],
        "resume": ["run", "--resume", "--out", out],
        "refused": ["run", *data, *settings, "--out", out],
        "missing": ["run", "--dataset", "folders", "--data-root", f"{root}-missing", *settings],
        "broken": ["run", "--dataset", "folders", "--data-root", root, *settings],
        "evaluate": ["evaluate", out],
        "predict": ["predict", out, image, broken],
        "predict json": ["predict", out, image, "--json"],
        "export": ["export", out, "--out", tmp_path / "model\x1b[7m.safetensors"],
        "audit": ["audit", out, "--steps", 0, "--samples", 10],
        "diagnose": ["diagnose", out, "--samples", 8],
        "report": ["report", out, "--samples", 0],
        "data check": ["data", "check", "folders", "--data-root", root, "--image-size", 8],
        "data show": ["data", "show", "folders", "--data-root", good, "--image-size", 8],
        "data prepare": ["data", "prepare", "folders", "--data-root", good, "--image-size", 8],
        "data partition": ["data", "partition", "folders", "--data-root", good, "--image-size", 8],
        "data cache": ["data", "cache"],
        "init": ["init", good, "--out", tmp_path / "new\x1b[7m.toml"],
        "wrong option": ["run", "--\x1b[31m"],
        "wrong setting": ["run", "--set", "data.\x1b[31m=1"],
        "wrong name": ["run", "--algorithm", "\x1b[31m\u202e"],
    }
    printed = {name: fedcir(*command) for name, command in commands.items() if every or name in QUICK}
    obeyed = {name: raw(message) for name, message in printed.items() if raw(message)}
    if tries := os.environ.get("FEDCIR_ESCAPE_TRIES"):
        Path(tries).write_text(
            "\n".join(f"{name}\t{message[0]}\t{sorted(raw(message))}" for name, message in printed.items())
        )
    assert obeyed == {}
    assert r"\u001b[31mred" in printed["run"][1]
    codes = {name: message[0] for name, message in printed.items()}
    failing = {"refused", "missing", "broken", "predict", "wrong option", "wrong setting", "wrong name"}
    assert {name for name, code in codes.items() if code != 0} <= {*failing, "data check"}
    [text] = json.loads(printed["predict json"][1])
    assert text["path"] == str(image)  # JSON stays exact
    assert text["class"] in CLASSES
    card = (tmp_path / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert not CONTROLS.search(card)


def test_a_redirected_csv_is_exact(capsys: pytest.CaptureFixture[str]) -> None:

    with escape_output():
        print("a\x1b", file=get_raw_stream(sys.stdout))
        print("a\x1b")
    assert capsys.readouterr().out == "a\x1b\na\\u001b\n"


def test_a_progress_bar_shows_names_and_neither_markup_nor_escape_sequences() -> None:
    screen = io.StringIO()
    with escape_output():
        console = make_console(screen, force_terminal=True, width=80)
        with Progress(PlainColumn("{task.description}"), console=console) as bars:
            bars.add_task("[red]\x1b]0;title\x07\r\u202ename", total=1)
            print("printed beside it \x9b2J\u202e", file=sys.stderr)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", screen.getvalue())  # rich's own styling
    assert r"[red]\u001b]0;title\u0007\u000d\u202ename" in shown
    assert not CONTROLS.search(shown)


def test_escaped_json_is_the_same_json() -> None:
    names = ["\x1b[31m", "\x9b\u202e\u2028", "ä€😀", "\ud800"]
    assert json.loads(escape_controls(json.dumps(names, ensure_ascii=False))) == names


def test_readable_text_stays_as_it_is() -> None:
    assert escape_controls("ä\tb\n€ 😀") == "ä\tb\n€ 😀"
    assert escape_line("a\nb") == r"a\nb"


def test_markdown_shows_names_as_text() -> None:
    assert escape_markdown("<img src=x> [a](b) | `c` & d") == r"&lt;img src=x&gt; \[a\](b) \| \`c\` &amp; d"
    assert format_code("cat") == "`cat`"
    assert format_code("a``<b>") == "``` a``<b> ```"


def test_a_model_card_shows_the_name_of_a_run_as_text(
    train: Callable[..., Path], tiny: Callable[..., object], fedcir: Callable[..., Said], tmp_path: Path
) -> None:
    run = train(tiny("fedavg", "server.rounds=1", "local.steps=1"), tmp_path / "<img src=x onerror=alert(1)>")
    assert fedcir("export", run, "--out", tmp_path / "model.safetensors")[0] == 0
    card = (tmp_path / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "# &lt;img src=x onerror=alert(1)&gt;\n" in card
    assert Predictor(run).classes
    assert fedcir("report", run, "--samples", 0, "--out", tmp_path / "report.html")[0] == 0
    assert "<img" not in (tmp_path / "report.html").read_text(encoding="utf-8")
