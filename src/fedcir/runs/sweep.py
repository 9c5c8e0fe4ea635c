"""Many runs, several at a time, each a process of its own that can be killed and resumed."""

import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedcir.algorithms import algorithm_class
from fedcir.config import Config, DataConfig, absolute_paths, config_tables, dump_toml
from fedcir.engine.files import file_hash, write
from fedcir.engine.folder import RunFolder, own_files
from fedcir.engine.machine import WORKERS
from fedcir.runs.events import EVENTS, told
from fedcir.runs.nursery import Nursery
from fedcir.types import InputError, RoundRecord

POLL_SECONDS = 0.2
SETTINGS = "settings"
"""The folder beside the runs that holds what was asked of each."""


@dataclass(frozen=True)
class Job:
    config: Config
    out: Path

    @property
    def asked(self) -> Path:
        """The file of settings that its process is given; it stays, so that a run that is done is known by it."""
        return self.out.parent / SETTINGS / f"{self.out.name}.toml"

    @property
    def settings(self) -> str:
        """Its settings as a file; how many processes train is said on the command line, as it may change."""
        return dump_toml(
            absolute_paths(config_tables(replace(self.config, run=replace(self.config.run, workers=None))))
        )

    @property
    def done(self) -> bool:
        """Whether it has been run to its end with the same settings, by the same algorithm and on the same model."""
        if not (RunFolder(self.out).finished and self.asked.is_file()):
            return False
        folder = RunFolder(self.out)
        same = all(file_hash(file) == folder.file_hash(what) for what, file in own_files(self.config).items())
        return same and self.asked.read_bytes() == self.settings.encode()

    @property
    def opens(self) -> tuple[DataConfig, int]:
        """What decides on the dataset that it opens."""
        return self.config.data, self.config.run.seed

    @property
    def length(self) -> int:
        """How long it takes beside other jobs of a sweep: the pixels that it trains on."""
        data, local, server = self.config.data, self.config.local, self.config.server
        images = server.rounds * local.steps * local.batch_size
        return images * (server.active or self.config.partition.clients or 1) * (data.image_size or 1) ** 2

    def command(self, resume: bool) -> list[str]:
        """The arguments of `fedcir` that do it, once its settings are written."""
        again = ["--resume"] if resume and RunFolder(self.out).exists else []
        return ["run", str(self.asked), "--out", str(self.out), "--quiet", "--no-report", *again]

    def write_settings(self) -> None:
        self.asked.parent.mkdir(parents=True, exist_ok=True)
        write(self.asked, self.settings)


@dataclass(frozen=True)
class Progress:
    """A job has begun, has done one more round, has ended, or has failed."""

    job: Job
    event: Literal["begun", "round", "ended", "failed"]
    jobs: int
    """How many there are in all."""
    record: RoundRecord | None = None
    said: str = ""
    """Why it failed."""
    notes: tuple[str, ...] = ()
    """What the user should know of a job that has ended."""
    trace: str = ""
    """What else it wrote if it failed, such as a traceback."""


def sweep(jobs: Sequence[Job], workers: int, resume: bool, track: str | None = None) -> Generator[Progress, None, None]:
    """Run all jobs, giving their rounds as they come. One that fails does not stop the others.

    As many run at a time as there are workers, since runs side by side lose nothing by waiting for each other. The
    longest begin first; where fewer are left, each gets several workers, also while it runs.
    """
    options = [] if track is None else ["--track", track]
    if workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    waiting = []
    for job in jobs:
        if resume and job.done and track is None:  # a tracker may not have been told of all its rounds
            yield Progress(job, "ended", len(jobs))
        else:
            waiting.append(job)
    waiting = longest_first(waiting)
    needed = Counter(job.opens for job in waiting)
    running: list[_Running] = []
    with Nursery() as nursery, ExitStack() as stack:
        stack.callback(_end, running)
        while waiting or running:
            while waiting and len(running) < workers:
                each = max(1, workers // (len(waiting) + len(running)))
                job = waiting.pop(0)
                running.append(_Running(job, nursery, each, resume, options, shares=needed[job.opens] > 1))
                yield Progress(job, "begun", len(jobs))
            if not waiting and track is None:  # a tracker has threads, beside which no worker is forked
                for number, process in enumerate(running):
                    process.allow((workers + len(running) - 1 - number) // len(running))
            for process in list(running):
                ended = process.ended()
                for record in process.new_records():
                    yield Progress(process.job, "round", len(jobs), record)
                if ended:
                    running.remove(process)
                    yield process.result(len(jobs))
            nursery.wait(POLL_SECONDS)


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """So that short ones fill the end. Of equal ones, those on the same data follow each other, which then are shared.

    Among these, a job that pools its data comes first: further workers do not help it.
    """
    first = {job.opens: number for number, job in reversed([*enumerate(jobs)])}
    return sorted(jobs, key=lambda job: (-job.length, first[job.opens], not _pools(job)))


def _pools(job: Job) -> bool:
    try:
        return algorithm_class(job.config.algorithm.name).pools is not None
    except InputError:  # which its process will tell
        return False


class _Running:
    """One job's process, and how far its rounds have been read."""

    def __init__(
        self, job: Job, nursery: Nursery, workers: int, resume: bool, options: Sequence[str], shares: bool
    ) -> None:
        self.job = job
        job.write_settings()
        command = [*job.command(resume), "--workers", str(workers), *options]
        self._said = tempfile.TemporaryDirectory(prefix="fedcir-")
        place = Path(self._said.name)
        self._events, self._errors, self._workers = (place / name for name in ("events.jsonl", "errors", "workers"))
        self._errors.touch()
        self._allowed = workers
        environment = {EVENTS: str(self._events), WORKERS: str(self._workers)}
        self._process = nursery.start(command, environment, self._errors, job.asked if shares else None)
        self._seen = 0
        self._changed: tuple[int, int] | None = None

    def allow(self, workers: int) -> None:
        """Let it have so many workers from its next round on, if that is more than it has."""
        if workers > self._allowed:
            self._allowed = workers
            write(self._workers, str(workers))

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
        try:
            new = RunFolder(self.job.out).records(after=self._seen)
        except InputError:  # a damaged file, on which the process itself ends and says so
            return []
        self._seen += len(new)
        return new

    def result(self, jobs: int) -> Progress:
        """How it ended, by what the process told."""
        events = told(self._events)
        trace = self._errors.read_text(encoding="utf-8", errors="replace").strip()
        code = self.wait()
        notes = tuple(each["text"] for each in events if each["event"] == "note")
        if code == 0:
            return Progress(self.job, "ended", jobs, notes=notes)
        why = [each["text"] for each in events if each["event"] == "failed"]
        said = why[-1] if why else f"exit code {code}"  # it was killed
        return Progress(self.job, "failed", jobs, None, said, notes, trace)

    def interrupt(self) -> None:
        """Ask the process to save its last round and end, once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        code = self._process.wait()
        self._said.cleanup()
        return code


def _end(running: Sequence[_Running]) -> None:
    for process in running:
        process.interrupt()
    for process in running:
        process.wait()
