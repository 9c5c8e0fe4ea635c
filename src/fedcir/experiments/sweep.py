"""Train several runs at a time, each in a process of its own that can be killed and resumed."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from fedcir.algorithms import find_algorithm
from fedcir.config import Config, config_to_tables, dump_toml, make_paths_absolute
from fedcir.errors import InputError
from fedcir.files import EVENTS_FILE, hash_file, read_events, write_file
from fedcir.machine import exit_with_parent
from fedcir.runtime.file_formats import find_custom_files
from fedcir.runtime.run_folder import RunFolder
from fedcir.types import RoundRecord

POLL_SECONDS = 0.1
SETTINGS = "settings"
"""Folder beside the runs that holds the settings file of each run."""


@dataclass(frozen=True)
class Job:
    """A run to train: its config and its folder."""

    config: Config
    out: Path

    @property
    def settings_path(self) -> Path:
        """The settings file of the run's process. It is kept, to tell whether a finished run has these settings."""
        return self.out.parent / SETTINGS / f"{self.out.name}.toml"

    @property
    def settings(self) -> str:
        """The settings as TOML, without the number of workers, which may change between processes."""
        return dump_toml(
            make_paths_absolute(config_to_tables(replace(self.config, run=replace(self.config.run, workers=None))))
        )

    @property
    def is_done(self) -> bool:
        """Whether the run has finished with the same settings, algorithm file and model file."""
        folder = RunFolder(self.out)
        if not (folder.finished and self.settings_path.is_file()):
            return False
        same = all(hash_file(file) == folder.file_hash(what) for what, file in find_custom_files(self.config).items())
        return same and self.settings_path.read_bytes() == self.settings.encode()

    @property
    def length(self) -> int:
        """Number of training pixels, a measure of duration relative to other jobs."""
        data, local, server = self.config.data, self.config.local, self.config.server
        images = server.rounds * local.steps * local.batch_size
        return images * (server.active or self.config.partition.clients or 1) * (data.image_size or 1) ** 2

    def command(self, resume: bool) -> list[str]:
        """Arguments of `fedcir` that train the run, once its settings are written."""
        flags = ["--resume"] if resume and RunFolder(self.out).exists else []
        return ["run", str(self.settings_path), "--out", str(self.out), "--quiet", "--no-report", *flags]

    def write_settings(self) -> None:
        self.settings_path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.settings_path, self.settings)


@dataclass(frozen=True)
class RunProgress:
    """Progress of a job: it has started, trained a round, ended or failed."""

    job: Job
    event: Literal["begun", "round", "ended", "failed"]
    jobs: int
    """Number of all jobs."""
    record: RoundRecord | None = None
    error: str = ""
    """Why the job failed."""
    notes: tuple[str, ...] = ()
    """Notes for the user about a job that has ended."""
    stderr: str = ""
    """Standard error of a job that failed, such as a traceback."""


def sweep(
    jobs: Sequence[Job], workers: int, resume: bool, track: str | None = None
) -> Generator[RunProgress, None, None]:
    """Run all jobs and yield their progress. A job that fails does not stop the others.

    There are as many runs at a time as workers, because runs do not wait for each other as the clients of a round do.
    The longest start first. A run that starts while fewer runs are left than workers gets several workers.
    """
    options = [] if track is None else ["--track", track]
    if workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    waiting = []
    for job in jobs:
        if resume and job.is_done and track is None:  # a tracker may lack some of its rounds
            yield RunProgress(job, "ended", len(jobs))
        else:
            waiting.append(job)
    waiting = longest_first(waiting)
    running: list[_RunProcess] = []
    with ExitStack() as stack:
        stack.callback(_interrupt_all, running)
        while waiting or running:
            while waiting and len(running) < workers:
                share = max(1, workers // (len(waiting) + len(running)))
                job = waiting.pop(0)
                running.append(_RunProcess(job, share, resume, options))
                yield RunProgress(job, "begun", len(jobs))
            for process in list(running):
                has_ended = process.has_ended()
                for record in process.read_new_records():
                    yield RunProgress(process.job, "round", len(jobs), record)
                if has_ended:
                    running.remove(process)
                    yield process.result(len(jobs))
            time.sleep(POLL_SECONDS)


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """Order jobs so that short ones fill the end. Of equal ones, those that pool data start first.

    Further workers do not speed up a job that pools its data.
    """

    def pools_data(job: Job) -> bool:
        try:
            return find_algorithm(job.config.algorithm.name).pools is not None
        except InputError:  # the run's own process reports it
            return False

    return sorted(jobs, key=lambda job: (-job.length, not pools_data(job)))


class _RunProcess:
    """Process of a job, and the number of its rounds that have been read."""

    def __init__(self, job: Job, workers: int, resume: bool, options: Sequence[str]) -> None:
        self.job = job
        job.write_settings()
        self.folder = tempfile.TemporaryDirectory(prefix="fedcir-")
        folder = Path(self.folder.name)
        self._events, self._errors = folder / "events.jsonl", folder / "errors"
        self._num_records = 0
        self._records_status: tuple[int, int] | None = None
        with open(self._errors, "wb") as errors:
            self.process = subprocess.Popen(
                # -P: a json.py in the current folder must not shadow the standard library's
                [sys.executable, "-P", "-m", "fedcir", *job.command(resume), "--workers", str(workers), *options],
                env={**os.environ, EVENTS_FILE: str(self._events)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # so that Ctrl-C reaches it once, through _interrupt_all()
                preexec_fn=partial(exit_with_parent, os.getpid(), signal.SIGINT)  # noqa: PLW1509
                if sys.platform == "linux"
                else None,
            )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def read_new_records(self) -> list[RoundRecord]:
        """Rounds since the last call. A resumed run may write some of them again, with the same values."""
        path = self.job.out / "rounds.jsonl"
        status = (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None
        if status == self._records_status:  # avoids reading all rounds at every poll
            return []
        self._records_status = status
        try:
            records = RunFolder(self.job.out).records(after=self._num_records)
        except InputError:  # a damaged file, which the run's process reports
            return []
        self._num_records += len(records)
        return records

    def result(self, jobs: int) -> RunProgress:
        """Return whether the run ended or failed, with its notes and its error."""
        events = read_events(self._events)
        stderr = self._errors.read_text(encoding="utf-8", errors="replace").strip()
        code = self.process.wait()
        self.folder.cleanup()
        notes = tuple(event["text"] for event in events if event["event"] == "note")
        if code == 0:
            return RunProgress(self.job, "ended", jobs, notes=notes)
        errors = [event["text"] for event in events if event["event"] == "failed"]
        error = errors[-1] if errors else f"exit code {code}"  # the process was killed
        return RunProgress(self.job, "failed", jobs, None, error, notes, stderr)


def _interrupt_all(running: Sequence[_RunProcess]) -> None:
    """Ask the processes to save their last round and end."""
    for run in running:
        if not run.has_ended():
            run.process.send_signal(signal.SIGINT)
    for run in running:
        run.process.wait()
        run.folder.cleanup()
