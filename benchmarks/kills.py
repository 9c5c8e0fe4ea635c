"""Kill commands with -9 at random moments, start them again, and compare what they leave with an undisturbed one.

python benchmarks/kills.py --kills 40 --deploys 10

Commands: run (two workers), compare (two methods), data prepare, report, deploy local. A command is killed once or
twice, then resumed as its own message says, or started again. Every file that must be equal is compared byte for byte.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

FEDCIR = (sys.executable, "-m", "fedcir")
SMALL = ("--rounds", "6", "--local-steps", "4", "--batch-size", "8", "--image-size", "16", "--no-report", "--quiet")
QUICK = (*SMALL, "--set", "model.width=4", "--set", "server.checkpoint_every=2")


@dataclass(frozen=True)
class Kind:
    """A command that is killed."""

    first: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    """How it is started after a kill."""
    files: Callable[[Path], Iterable[Path]]
    """What it leaves, which must be equal."""


def started(words: Iterable[str], place: Path) -> "subprocess.Popen[bytes]":
    own = {"FEDCIR_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*FEDCIR, *words],
        env={**os.environ, **own},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def ended(words: Iterable[str], place: Path) -> float:
    """Run a command to its end, and say how long it took."""
    begun = time.monotonic()
    process = started(words, place)
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"fedcir {' '.join(words)} failed: {said.decode().strip()[-500:]}")
    return time.monotonic() - begun


def killed(words: list[str], place: Path, after: float) -> bool:
    """Start a command and kill it after some seconds; whether it was still running then."""
    process = started(words, place)
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return True
    process.communicate()
    return False


def digest(kind: Kind, place: Path) -> dict[str, str]:
    return {
        str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(kind.files(place))
    }


def folders(root: Path) -> None:
    """Three domains of two classes, as a user's folders."""
    rng = np.random.default_rng(0)
    for domain in ("clinic", "hospital", "practice"):
        for label in ("ill", "well"):
            (root / domain / label).mkdir(parents=True)
            for number in range(150):
                pixels = rng.integers(0, 256, (48, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / domain / label / f"{number}.png")


def kinds(data: Path, run: Path) -> dict[str, Kind]:
    def training(command: str, *more: str) -> Kind:
        def words(place: Path, resume: bool) -> list[str]:
            out = place / "out"
            kept = resume and (out.is_dir() and (command != "run" or (out / "config.toml").exists()))
            return [command, *QUICK, *more, "--out", str(out), *(["--resume"] if kept else [])]

        def files(place: Path) -> Iterable[Path]:
            return [*(place / "out").rglob("model.safetensors"), *(place / "out").rglob("manifest.json")]

        return Kind(lambda place: words(place, False), lambda place: words(place, True), files)

    prepare = ["data", "prepare", "folders", "--data-root", str(data)]
    return {
        "run": training("run", "--workers", "2"),
        "compare": training("compare", "--algorithms", "fedavg,fedcir", "--workers", "2"),
        "data prepare": Kind(lambda _: prepare, lambda _: prepare, lambda place: (place / "cache").rglob("*.npy")),
        "report": Kind(
            lambda place: ["report", str(run), "-o", str(place / "page.html")],
            lambda place: ["report", str(run), "-o", str(place / "page.html")],
            lambda place: [place / "page.html"],
        ),
        "deploy local": training("deploy local"),
    }


def tried(name: str, kind: Kind, times: int, work: Path, rng: random.Random) -> dict[str, object]:
    """Kill a command so many times; it is resumed after each, and the last resume is left alone."""
    reference = work / "reference"
    reference.mkdir(parents=True)
    seconds = ended(_words(kind.first(reference)), reference)
    expected = digest(kind, reference)
    assert expected, f"{name} leaves nothing to compare"
    kills = equal = rounds = 0
    while kills < times:
        place = work / f"try-{rounds}"
        place.mkdir()
        words = kind.first(place)
        for _ in range(rng.choice((1, 1, 2))):
            kills += killed(_words(words), place, rng.uniform(0.05, seconds))
            words = kind.again(place)
        ended(_words(words), place)
        rounds += 1
        if digest(kind, place) == expected:
            equal += 1
        else:
            print(f"{name}: {place} differs", flush=True)
        shutil.rmtree(place)
    return {"command": name, "kills": kills, "tries": rounds, "equal": equal, "seconds": round(seconds, 1)}


def _words(words: list[str]) -> list[str]:
    return [*words[0].split(), *words[1:]]


def left_over(work: Path) -> list[int]:
    """Processes that still name the working folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(work).encode() in (process / "cmdline").read_bytes() and int(process.name) != os.getpid():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="Of each command but deploy local.")
    parser.add_argument("--deploys", type=int, default=10, help="Kills of deploy local, which takes a minute each.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="fedcir-kills-") as folder:
        work = Path(folder)
        folders(work / "data")
        ended(["run", *QUICK, "--out", str(work / "run")], work)
        rows = []
        for name, kind in kinds(work / "data", work / "run").items():
            if given.only and name not in given.only:
                continue
            times = given.deploys if name == "deploy local" else given.kills
            rows.append(tried(name, kind, times, work / name.replace(" ", "-"), rng))
            print(rows[-1], flush=True)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        time.sleep(5)
        print("processes left:", left_over(work) or "none")


if __name__ == "__main__":
    main()
