"""Progress on standard error: bars on a terminal, plain lines in a log."""

import sys
import time
from contextlib import AbstractContextManager
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

from fedcir.cli.application import Interrupted, debugging
from fedcir.cli.output import get_raw_stream
from fedcir.text import escape_controls, escape_line
from fedcir.types import RoundRecord

if TYPE_CHECKING:
    from fedcir.experiments.sweep import RunProgress


class PlainConsole(Console):
    """A console that escapes control characters in the texts it prints."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, also for others that print while a bar is shown."""
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


class Display:
    """Progress of runs by name; nothing with `quiet`.

    In a log, it prints a line for each round that was evaluated or had failures, or for `every` round. With more than
    MANY `runs`, it shows those in progress and how many are done.
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
        losses = " ".join(f"{loss} {value:.3g}" for loss, value in record.losses.items())
        epsilon = "" if record.epsilon is None else f"epsilon {record.epsilon:.3g}"
        dropped = "; ".join(f"client {client} dropped: {reason}" for client, reason in record.dropped.items())
        state = "  ".join(filter(None, [losses, self._accuracy.get(name), epsilon, dropped]))
        self._bars.update(self._tasks[name], completed=record.round, state=state)
        self._share[name] = record.round / self._totals[name]
        self._advance()
        if self._lines and not self._many and (self._every or record.accuracy_mean is not None or record.dropped):
            started, done = self._first[name]
            total = self._totals[name]
            remaining = (time.monotonic() - started) / max(1, record.round - done) * (total - record.round)
            print(f"{name}: round {record.round}/{total}  {state}  {_format_clock(remaining)} left", file=sys.stderr)

    def end(self, name: str, failure: str = "") -> None:
        """Mark one of several runs as done or failed."""
        self._done += 1
        started = name in self._tasks
        self._worked += started
        result = f"failed: {failure}" if failure else self._accuracy.get(name, "done")
        self._share.pop(name, None)
        self._advance()
        if self._many:
            if started:
                self._bars.remove_task(self._tasks.pop(name))
            if self._lines and started:
                remaining = (time.monotonic() - self._started) / self._worked * (self._runs - self._done)
                print(f"{self._done}/{self._runs} {name}: {result}  {_format_clock(remaining)} left", file=sys.stderr)
        elif failure and self._lines:
            print(f"{name}: {result}", file=sys.stderr)
        elif failure:
            self._bars.update(self._tasks[name], state=result)

    def _advance(self) -> None:
        """Update the bar of all runs; runs in progress count by their rounds."""
        if self._many:
            self._bars.update(self._all, completed=self._done + sum(self._share.values()))


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
