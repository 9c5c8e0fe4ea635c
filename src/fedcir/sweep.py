"""Many runs, several at a time, each a process of its own that can be killed and resumed."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from fedcir.config import Config, config_tables, dump_toml
from fedcir.records import RunFolder
from fedcir.types import InputError, RoundRecord

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    config: Config
    out: Path


@dataclass(frozen=True)
class Progress:
    """A job has begun, has done one more round, or has ended."""

    job: Job
    event: Literal["begun", "round", "ended"]
    record: RoundRecord | None = None
    notes: tuple[str, ...] = ()
    """What the user should know of a job that has ended."""


def sweep(jobs: Sequence[Job], workers: int, resume: bool, track: str | None = None) -> Iterator[Progress]:
    """Run all jobs, giving their rounds as they come. A job that fails ends the sweep; what others did is kept."""
    options = [*(["--resume"] if resume else []), *([] if track is None else ["--track", track])]
    if workers < 1:
        raise InputError(f"--workers must be at least 1, got {workers}")
    waiting = list(jobs)
    running: list[_Running] = []
    with ExitStack() as stack:
        configs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(_end, running)
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                running.append(_Running(job, configs / f"{len(waiting)}.toml", options))
                yield Progress(job, "begun")
            for process in list(running):
                ended = process.ended()
                yield from (Progress(process.job, "round", record) for record in process.new_records())
                if ended:
                    notes = process.check()
                    running.remove(process)
                    yield Progress(process.job, "ended", notes=notes)
            time.sleep(POLL_SECONDS)


class _Running:
    """One job's process, and how far its rounds have been read."""

    def __init__(self, job: Job, config: Path, options: Sequence[str]) -> None:
        self.job = job
        config.write_text(dump_toml(config_tables(job.config)), encoding="utf-8")
        # -P: a json.py in the current folder must not take the place of the real one
        command = [sys.executable, "-P", "-m", "fedcir", "run", str(config), "--out", str(job.out), "--quiet"]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in check)
        self._process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # so that Ctrl-C reaches it once, through interrupt()
        )
        self._seen = 0
        self._changed: tuple[int, int] | None = None

    def ended(self) -> bool:
        return self._process.poll() is not None

    def new_records(self) -> list[RoundRecord]:
        """Rounds that were added since the last call. A resumed run may write some again, to the same bits."""
        path = self.job.out / "rounds.jsonl"
        status = path.stat() if path.exists() else None
        changed = None if status is None else (status.st_size, status.st_mtime_ns)
        if changed == self._changed:  # most polls find nothing new, and need not read all rounds to see it
            return []
        self._changed = changed
        new = [record for record in RunFolder(self.job.out).records() if record.round > self._seen]
        self._seen += len(new)
        return new

    def check(self) -> tuple[str, ...]:
        """Raise what the process said if it failed; give its notes if it did not."""
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        self.wait()
        if self._process.returncode != 0:
            last = said.splitlines()[-1].removeprefix("fedcir: ") if said else f"exit code {self._process.returncode}"
            raise InputError(f"{self.job.out} failed: {last}")
        return tuple(line.removeprefix("note: ") for line in said.splitlines() if line.startswith("note: "))

    def interrupt(self) -> None:
        """Ask the process to save its last round and end, once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        self._process.wait()
        self._errors.close()


def _end(running: Sequence[_Running]) -> None:
    for process in running:
        process.interrupt()
    for process in running:
        process.wait()
