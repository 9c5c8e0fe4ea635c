"""Progress on standard error: bars on a terminal, plain lines in a log."""

import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fedcir.cli.application import Interrupted, debugging, get_raw_stream
from fedcir.text import escape_controls, escape_line
from fedcir.types import RoundRecord

if TYPE_CHECKING:
    from fedcir.experiments.sweep import RunProgress


class PlainConsole(Console):
    """A console that escapes control characters in the texts it prints."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; rich also calls it for output of others while a bar is shown."""
        texts = (Text(escape_controls(item.plain)) if isinstance(item, Text) else item for item in objects)
        super().print(*texts, **options)


def make_console(stream: IO[str], **options: Any) -> Console:
    return PlainConsole(file=get_raw_stream(stream), highlight=False, markup=False, emoji=False, **options)


class PlainColumn(TextColumn):
    """A column of a progress bar whose text is neither markup nor a control sequence."""

    def render(self, task: Task) -> Text:
        return Text(escape_line(self.text_format.format(task=task)))


class Meter(AbstractContextManager["Meter"]):
    """Progress of one long task, shown once it takes longer than half a second; nothing with `quiet`."""

    DELAY = 0.5

    def __init__(self, label: str, quiet: bool, unit: str = "") -> None:
        self._label, self._unit = label, unit
        self._console = make_console(sys.stderr)
        self._quiet = quiet
        self._started = self._printed = time.monotonic()
        self._bars: Progress | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def show(self, done: int, total: int | None, label: str | None = None) -> None:
        now = time.monotonic()
        if self._quiet or now - self._started < self.DELAY:
            return
        label = label or self._label
        if not self._console.is_terminal:
            if now - self._printed > 10 * self.DELAY:
                self._printed = now
                print(f"{label}: {done:,}{self._unit}{'' if total is None else f' of {total:,}'}", file=sys.stderr)
            return
        if self._bars is None:
            columns = (PlainColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn())
            self._bars = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._bars.add_task(label, total=total)
            self._bars.start()
        self._bars.update(self._bars.task_ids[0], completed=done, total=total, description=label)


@dataclass
class RunState:
    """Progress of one run in a Display."""

    task: TaskID
    total: int
    """Number of rounds of the run."""
    started: float | None = None
    """Time at which the first round of this process began; an earlier process may have done others."""
    before: int = 0
    """Number of rounds before that one."""
    share: float = 0.0
    scores: str = ""


class Display(AbstractContextManager["Display"]):
    """Progress of runs by name; nothing with `quiet`.

    In a log, it prints a line for each round that was evaluated or had failures, or for `every` round. With more than
    MANY `runs`, it shows those in progress and how many are done.
    """

    MANY = 8

    def __init__(self, quiet: bool, every: bool = False, runs: int = 1) -> None:
        self._every, self._count, self._many = every, runs, runs > self.MANY
        self._runs: dict[str, RunState] = {}
        self._ended = self._worked = 0
        self._started = time.monotonic()
        console = make_console(sys.stderr)
        self._lines = not quiet and not console.is_terminal
        bar = (PlainColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
        state = (PlainColumn("{task.fields[state]}"), TimeElapsedColumn(), TimeRemainingColumn())
        self._bars = Progress(*bar, *state, console=console, disable=quiet or not console.is_terminal)
        self._all = self._bars.add_task("all runs", total=runs, state="", visible=self._many)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def begin(self, name: str, total: int) -> None:
        """Announce a run."""
        self._runs[name] = RunState(self._bars.add_task(name, total=total, state="starting"), total)

    def show(self, name: str, record: RoundRecord) -> None:
        run = self._runs[name]
        if run.started is None:  # loading happens once, in the first round, and says nothing of the others
            took = record.seconds["total"] - record.seconds.get("load", 0.0)
            run.started, run.before = time.monotonic() - took, record.round - 1
        run.scores = record.describe_scores() or run.scores
        losses = " ".join(f"{loss} {value:.3g}" for loss, value in record.losses.items())
        epsilon = "" if record.epsilon is None else f"epsilon {record.epsilon:.3g}"
        dropped = "; ".join(f"client {client} dropped: {reason}" for client, reason in record.dropped.items())
        state = "  ".join(filter(None, [losses, run.scores, epsilon, dropped]))
        run.share = record.round / run.total
        self._bars.update(run.task, completed=record.round, state=state)
        self._advance()
        if self._lines and not self._many and (self._every or record.score_mean is not None or record.dropped):
            left = (time.monotonic() - run.started) / max(1, record.round - run.before) * (run.total - record.round)
            print(f"{name}: round {record.round}/{run.total}  {state}  {_format_clock(left)} left", file=sys.stderr)

    def end(self, name: str, failure: str = "") -> None:
        """Mark one of several runs as done or failed."""
        run = self._runs.pop(name, None)
        self._ended += 1
        self._worked += run is not None
        self._advance()
        result = f"failed: {failure}" if failure else (run and run.scores) or "done"
        if run is not None and self._many:
            self._bars.remove_task(run.task)
            if self._lines:
                left = (time.monotonic() - self._started) / self._worked * (self._count - self._ended)
                done = f"{self._ended}/{self._count}"
                print(f"{done} {name}: {result}  {_format_clock(left)} left", file=sys.stderr)
        elif failure and self._lines and not self._many:
            print(f"{name}: {result}", file=sys.stderr)
        elif failure and run is not None:
            self._bars.update(run.task, state=result)

    def _advance(self) -> None:
        """Update the bar of all runs; runs in progress count by their rounds."""
        self._bars.update(self._all, completed=self._ended + sum(run.share for run in self._runs.values()))


class Watch(AbstractContextManager["Watch"]):
    """Progress of a command with several parts: long work, runs and notes; with `quiet`, little of it.

    If Ctrl-C stops the command after runs have started, the error says how to continue.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._started_runs = quiet, False
        self._meter: Meter | None = None
        self._display: Display | None = None

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close()
        if self._started_runs and kind is KeyboardInterrupt:
            raise Interrupted("rounds are saved; continue with the same command and --resume") from None

    def close(self) -> None:
        """Remove the bars from the terminal."""
        if self._meter is not None:
            self._meter.close()
        if self._display is not None:
            self._display.__exit__(None, None, None)
        self._meter = self._display = None

    def callbacks(self) -> dict[str, Any]:
        """Return the callbacks under the names that library functions take."""
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

    def progress(self, step: "RunProgress") -> None:
        if self._display is None:
            self.close()
            self._display = Display(self._quiet, runs=step.jobs).__enter__()
            self._started_runs = True
        name = step.job.out.name
        if step.event == "begun":
            self._display.begin(name, step.job.config.server.rounds)
        elif step.record is not None:
            self._display.show(name, step.record)
        else:
            self._display.end(name, step.error)
            if debugging() and step.stderr:
                print(step.stderr, file=sys.stderr)
        for note in step.notes:
            print(f"note: {name}: {note}", file=sys.stderr)


def _format_clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
