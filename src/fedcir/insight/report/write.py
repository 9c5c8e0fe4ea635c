"""The report as people ask for it: folders in, a page out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedcir.insight.report.report import SAMPLES
from fedcir.insight.report.report import report as write_page
from fedcir.runs.batch import OnNote, OnWork, check_target, unheard
from fedcir.runs.run import Source, run_folders
from fedcir.types import InputError

MEASURING = "measuring distances in runs"


@dataclass(frozen=True)
class Page:
    path: Path
    notes: tuple[str, ...]
    """What could not be read or measured."""


def report(
    runs: str | Path | Sequence[str | Path],
    *,
    out: str | Path = "report.html",
    target: float | None = None,
    samples: int = SAMPLES,
    data_root: str | Path | None = None,
    trust_code: bool = False,
    on_work: OnWork = unheard,
) -> Page:
    """Write one page on what finished runs on the same data came to, as `fedcir report` does.

    `runs` are folders of runs, or folders that hold such. `target` is an accuracy to reach, FedAvg's last if not given;
    `samples` are the test images of each domain to measure distances on, 0 for none. `data_root` holds the data now, if
    they were moved. `trust_code` lets code of a run's own run, which distances need.
    """
    check_target(target)
    path = Path(out)
    if samples and samples < 8:
        raise InputError(f"samples must be at least 8, or 0 for none, got {samples}")
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}")
    paths = [Path(each) for each in ([runs] if isinstance(runs, str | Path) else runs)]
    folders = list({folder.resolve(): folder for folder in run_folders(paths)}.values())
    root = None if data_root is None else str(data_root)
    on_run = partial(on_work, what=MEASURING)
    notes = write_page(
        folders, path, target=target, samples=samples, data_root=root, on_run=on_run, trust_code=trust_code
    )
    return Page(path, notes)


def add_report(
    runs: Sequence[Source],
    path: Path,
    target: float | None = None,
    on_work: OnWork = unheard,
    on_note: OnNote = unheard,
) -> Path | None:
    """The same where runs are what was asked for and the page comes on top: what is wrong with it is a note.

    Their code has just run.
    """
    try:
        notes = write_page(runs, path, target=target, on_run=partial(on_work, what=MEASURING), trust_code=True)
    except InputError as error:
        on_note(f"no {path.name}: {error}")
        return None
    for note in notes:
        on_note(f"{path.name}: {note}")
    return path
