"""How progress looks: bars on a terminal, plain lines in a log."""

import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedcir.cli.console import PlainColumn, make_console
from fedcir.cli.failure import debugging
from fedcir.cli.interrupt import Interrupted
from fedcir.types import RoundRecord

if TYPE_CHECKING:
    from fedcir.runs.sweep import Progress as Step


class Meter(AbstractContextManager["Meter"]):
    """Shows how much of one long task is done, once it takes longer than a moment; with `quiet` it shows nothing."""

    PATIENCE = 0.5

    def __init__(self, what: str, quiet: bool, unit: str = "") -> None:
        self._what, self._unit = what, unit
        self._console = make_console(sys.stderr)
        self._quiet = quiet
        self._started = self._said = time.monotonic()
        self._bars: Progress | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def show(self, done: int, total: int | None, what: str | None = None) -> None:
        now = time.monotonic()
        if self._quiet or now - self._started < self.PATIENCE:
            return
        what = what or self._what
        if not self._console.is_terminal:
            if now - self._said > 10 * self.PATIENCE:
                self._said = now
                print(f"{what}: {done:,}{self._unit}{'' if total is None else f' of {total:,}'}", file=sys.stderr)
            return
        if self._bars is None:
            columns = (PlainColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn())
            self._bars = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._bars.add_task(what, total=total)
            self._bars.start()
        self._bars.update(self._bars.task_ids[0], completed=done, total=total, description=what)


class Display:
    """Shows runs by name on standard error; with `quiet` it shows nothing.

    Where that is no terminal it writes a line for a round that was evaluated or went wrong, or for `every` round.
    Of more than MANY `runs` it shows those under way and how many are done.
    """

    MANY = 8

    def __init__(self, quiet: bool, every: bool = False, runs: int = 1) -> None:
        self._every = every
        self._runs, self._done, self._worked = runs, 0, 0
        self._share: dict[str, float] = {}
        self._started = time.monotonic()
        console = make_console(sys.stderr)
        self._lines = not quiet and not console.is_terminal
        self._bars = Progress(
            PlainColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            PlainColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._first: dict[str, tuple[float, int]] = {}
        self._totals: dict[str, int] = {}
        self._accuracy: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        if self._many:
            self._all = self._bars.add_task("all runs", total=self._runs, state="")
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    @property
    def _many(self) -> bool:
        return self._runs > self.MANY

    def begin(self, name: str, total: int) -> None:
        """Announce a run."""
        self._totals[name] = total
        self._tasks[name] = self._bars.add_task(name, total=total, state="starting")

    def show(self, name: str, record: RoundRecord) -> None:
        # The time left is measured from the first round seen: an earlier process may have done those before it.
        # Loading happens once, in the first round, and says nothing of the others.
        took = record.seconds["total"] - record.seconds.get("load", 0.0)
        self._first.setdefault(name, (time.monotonic() - took, record.round - 1))
        if record.accuracy_mean is not None:
            unseen = "" if record.accuracy_unseen is None else f", unseen {record.accuracy_unseen:.1%}"
            self._accuracy[name] = f"acc {record.accuracy_mean:.1%}, worst {record.accuracy_worst:.1%}{unseen}"
        told = [_losses(record), self._accuracy.get(name), _epsilon(record), _dropped(record)]
        state = "  ".join(filter(None, told))
        self._bars.update(self._tasks[name], completed=record.round, state=state)
        self._share[name] = record.round / self._totals[name]
        self._advance()
        if self._lines and not self._many and (self._every or record.accuracy_mean is not None or record.dropped):
            print(
                f"{name}: round {record.round}/{self._totals[name]}  {state}  {self._left(name, record)}",
                file=sys.stderr,
            )

    def end(self, name: str, failure: str = "") -> None:
        """One of several runs is done, or has failed."""
        self._done += 1
        begun = name in self._tasks
        self._worked += begun
        said = f"failed: {failure}" if failure else self._accuracy.get(name, "done")
        self._share.pop(name, None)
        self._advance()
        if self._many:
            if begun:
                self._bars.remove_task(self._tasks.pop(name))
            if self._lines and begun:
                left = (time.monotonic() - self._started) / self._worked * (self._runs - self._done)
                print(f"{self._done}/{self._runs} {name}: {said}  {_clock(left)} left", file=sys.stderr)
        elif failure and self._lines:
            print(f"{name}: {said}", file=sys.stderr)
        elif failure:
            self._bars.update(self._tasks[name], state=said)

    def _advance(self) -> None:
        """How many of all runs are done; those under way count by their rounds."""
        if self._many:
            self._bars.update(self._all, completed=self._done + sum(self._share.values()))

    def _left(self, name: str, record: RoundRecord) -> str:
        started, done = self._first[name]
        seconds = (time.monotonic() - started) / max(1, record.round - done) * (self._totals[name] - record.round)
        return f"{_clock(seconds)} left"


class Watch(AbstractContextManager["Watch"]):
    """Shows the progress of a command with several parts: long work, runs and notes; with `quiet` little of it.

    If Ctrl-C stops it once runs have begun, it says how to continue.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._begun = quiet, False
        self._meter: Meter | None = None
        self._display: Display | None = None

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close()
        if self._begun and kind is KeyboardInterrupt:
            raise Interrupted("rounds are saved; continue with the same command and --resume") from None

    def close(self) -> None:
        """Leave the terminal to others."""
        if self._meter is not None:
            self._meter.close()
        if self._display is not None:
            self._display.__exit__(None, None, None)
        self._meter = self._display = None

    def callbacks(self) -> dict[str, Any]:
        """By the names that functions of the package take."""
        return {"on_progress": self.progress, "on_work": self.work, "on_note": self.note}

    def work(self, done: int, total: int | None, what: str) -> None:
        if self._meter is None:
            self.close()
            self._meter = Meter(what, self._quiet)
        self._meter.show(done, total, what)

    def note(self, text: str) -> None:
        self.close()
        if not self._quiet:
            print(f"note: {text}", file=sys.stderr)

    def progress(self, step: "Step") -> None:
        if self._display is None:
            self.close()
            self._display = Display(self._quiet, runs=step.jobs).__enter__()
            self._begun = True
        name = step.job.out.name
        if step.event == "begun":
            self._display.begin(name, step.job.config.server.rounds)
        elif step.record is not None:
            self._display.show(name, step.record)
        else:
            self._display.end(name, step.said)
            if debugging() and step.trace:
                print(step.trace, file=sys.stderr)
        for note in step.notes:
            print(f"note: {name}: {note}", file=sys.stderr)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _losses(record: RoundRecord) -> str:
    return " ".join(f"{name} {value:.3g}" for name, value in record.losses.items())


def _epsilon(record: RoundRecord) -> str:
    return "" if record.epsilon is None else f"epsilon {record.epsilon:.3g}"


def _dropped(record: RoundRecord) -> str:
    return "; ".join(f"client {client} dropped: {reason}" for client, reason in record.dropped.items())
