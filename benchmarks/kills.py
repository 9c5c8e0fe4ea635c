"""Kill commands with -9 at random moments, start them again, and compare what they leave with an undisturbed one.

python benchmarks/kills.py --kills 46 --deploys 16 --json kills.json
python benchmarks/kills.py --table kills.json more.json

Commands: run (two workers), compare (two methods), data prepare, report, deploy local. A command is killed up to four
times: its own process, one that it started, or all of them at once. Then it is resumed, or started again. Every file
that must be equal is compared byte for byte, and neither a process nor a private key may be left.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

from fedcir.reporting.page import to_markdown

FEDCIR = (sys.executable, "-m", "fedcir")
SMALL = ("--rounds", "6", "--local-steps", "4", "--batch-size", "8", "--image-size", "16", "--no-report", "--quiet")
QUICK = (*SMALL, "--set", "model.width=4", "--set", "server.checkpoint_every=2")
OWN, ONE, ALL = "its process", "one that it started", "all at once"
GRACE = 30
"""Seconds in which processes of a killed command may end, on a busy machine."""


@dataclass(frozen=True)
class Kind:
    """A command that is killed."""

    words: Callable[[Path, bool], list[str]]
    """It, in a folder, for the first time or again after a kill."""
    files: Callable[[Path], Iterable[Path]]
    """What it leaves, which must be equal."""
    whom: tuple[str, ...] = (OWN, ONE, ALL)


def started(words: Iterable[str], place: Path) -> psutil.Popen:
    (place / "tmp").mkdir(exist_ok=True)
    own = {"FEDCIR_CACHE": str(place / "cache"), "TMPDIR": str(place / "tmp"), "OMP_NUM_THREADS": "1"}
    with open(place / "said", "wb") as said:  # no pipe, which a process that is left would hold open
        return psutil.Popen(
            [*FEDCIR, *words],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def ended(words: list[str], place: Path) -> float:
    """Run a command to its end, and say how long it took."""
    begun = time.monotonic()
    if started(words, place).wait():
        said = (place / "said").read_text(encoding="utf-8", errors="replace").strip()
        raise SystemExit(f"fedcir {' '.join(words)} failed: {said[-1000:]}")
    return time.monotonic() - begun


def killed(process: psutil.Popen, whom: str, after: float, rng: random.Random) -> str | None:
    """Kill a command after some seconds; who was killed, None if it had ended by then."""
    with suppress(psutil.TimeoutExpired):
        process.wait(after)
        return None
    try:
        children = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return None
    if whom == ONE and children:
        with suppress(psutil.NoSuchProcess):
            rng.choice(children).kill()
        process.wait()  # it goes on without it, or ends
        return ONE
    for each in (process, *(children if whom == ALL else ())):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    return whom if whom == ALL else OWN


def digest(kind: Kind, place: Path) -> dict[str, str]:
    return {
        str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(kind.files(place))
    }


def processes(place: Path) -> list[str]:
    """Commands of processes that were started for a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FEDCIR_CACHE") == str(place / "cache") and process.status() != "zombie":
                found.append(" ".join(process.cmdline()))
    return found


def left(place: Path, keys: bool = True) -> Iterator[str]:
    """Processes and private keys that are still there after a while. If all were killed, the next one removes keys."""
    until = time.monotonic() + GRACE
    while (living := processes(place)) and time.monotonic() < until:
        time.sleep(0.5)
    yield from (f"process {each}" for each in living)
    files = place.rglob("*") if keys else ()
    yield from (str(file) for file in files if file.is_file() and b"PRIVATE KEY" in file.read_bytes())


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
    def training(*command: str, whom: tuple[str, ...] = (OWN, ONE, ALL), tables: bool = False) -> Kind:
        def words(place: Path, again: bool) -> list[str]:
            out = place / "out"
            begun = (out / "config.toml").exists() or command[
                0
            ] == "compare"  # else it says: start one without --resume
            return [*command, *QUICK, "--out", str(out), *(["--resume"] if again and begun else [])]

        # the manifest of a deployment holds keys that are drawn anew
        names = ["model.safetensors", *([] if command[0] == "deploy" else ["manifest.json"])]
        names += ["comparison.json"] if tables else []
        return Kind(words, lambda place: (file for name in names for file in (place / "out").rglob(name)), whom)

    return {
        "run": training("run", "--workers", "2"),
        "compare": training("compare", "--algorithms", "fedavg,fedcir", "--workers", "2", tables=True),
        "data prepare": Kind(
            lambda place, again: ["data", "prepare", "folders", "--data-root", str(data)],
            lambda place: (file for file in (place / "cache").rglob("*.npy")),
        ),
        "report": Kind(
            lambda place, again: ["report", str(run), "-o", str(place / "page.html")],
            lambda place: [place / "page.html"],
        ),
        "deploy local": training("deploy", "local", whom=(OWN, ALL)),
    }


def tried(kind: Kind, times: int, work: Path, rng: random.Random) -> Iterator[tuple[Counter[str], list[str]]]:
    """Kill a command so many times, in tries of one to four; of each try, who was killed and what was wrong."""
    reference = work / "reference"
    reference.mkdir(parents=True)
    seconds = ended(kind.words(reference, False), reference)
    expected = digest(kind, reference)
    assert expected, "nothing is left to compare"
    done = 0
    while done < times:
        place = work / f"try-{done}"
        place.mkdir()
        kills: Counter[str] = Counter()
        faults: list[str] = []
        for number in range(rng.choice((1, 2, 3, 4))):
            process = started(kind.words(place, number > 0), place)
            if whom := killed(process, rng.choice(kind.whom), rng.uniform(0.05, seconds), rng):
                kills[whom] += 1
            faults += [f"left: {each}" for each in left(place, keys=whom != ALL)]
        ended(kind.words(place, True), place)
        faults += [f"left at the end: {each}" for each in left(place)]
        if digest(kind, place) != expected:
            faults.append("what it leaves differs")
        done += kills.total()
        shutil.rmtree(place)
        yield kills, faults


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Kills by command and by who was killed, and how many of them ended in equal files."""
    kills: Counter[tuple[str, str]] = Counter()
    equal: Counter[tuple[str, str]] = Counter()
    for row in rows:
        kills[row["command"], row["killed"]] += row["kills"]
        equal[row["command"], row["killed"]] += row["equal"]
    lines = [[*key, f"{kills[key]}", f"{equal[key]}"] for key in kills]
    all_of_them = ["all", "", f"{kills.total()}", f"{equal.total()}"]
    return to_markdown([["command", "killed", "kills", "identical"], *lines, all_of_them])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=46, help="Of each command but deploy local.")
    parser.add_argument("--deploys", type=int, default=16, help="Kills of deploy local, which takes a minute each.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="Commands to kill; all if not given.")
    parser.add_argument("--json", type=Path, help="File for the numbers.")
    parser.add_argument("--table", type=Path, nargs="*", help="Print the table of such files, and kill nothing.")
    given = parser.parse_args()
    if given.table:
        print(table(row for file in given.table for row in json.loads(file.read_text(encoding="utf-8"))))
        return
    rng, rows, wrong = random.Random(given.seed), [], False
    with tempfile.TemporaryDirectory(prefix="fedcir-kills-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        folders(work / "data")
        (work / "run").mkdir()
        ended(["run", *QUICK, "--out", str(work / "run" / "out")], work / "run")
        for name, kind in kinds(work / "data", work / "run" / "out").items():
            if given.only and name not in given.only:
                continue
            times = given.deploys if name == "deploy local" else given.kills
            for kills, faults in tried(kind, times, work / name.replace(" ", "-"), rng):
                equal = "what it leaves differs" not in faults
                rows += [{"command": name, "killed": whom, "kills": n, "equal": n * equal} for whom, n in kills.items()]
                print(name, dict(kills), *(faults or ["identical"]), flush=True)
                wrong = wrong or bool(faults)
                if given.json:
                    given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    sys.exit(wrong)


if __name__ == "__main__":
    main()
