"""Do clients differ, where, and did training close the gap: asked of a dataset, of a run or of two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedcir.analysis.diagnose import Diagnosis, as_json, diagnose_data, diagnose_run, verdict
from fedcir.config import Asked
from fedcir.insight.report.picture import check_picture, draw_diagnosis
from fedcir.runs.batch import OnWork, unheard
from fedcir.runs.run import load_run, run_folders, same_data
from fedcir.types import InputError


@dataclass(frozen=True)
class Diagnosed:
    """What was found of data or of a run, or of two runs side by side."""

    found: Sequence[Diagnosis]
    verdict: Sequence[str]
    """The answer, in sentences."""
    picture: Path | None

    def to_rows(self) -> list[dict[str, Any]]:
        """The numbers for a program, a dict for each of what was looked at."""
        rows = [as_json(each) for each in self.found]
        rows[0]["verdict"] = self.verdict
        return rows


def diagnose(
    runs: str | Path | Sequence[str | Path] = (),
    *,
    data_root: str | Path | None = None,
    samples: int = 1000,
    projection: str = "pca",
    out: str | Path | None = "diagnosis.png",
    set: Sequence[str] | Mapping[str, Any] = (),
    trust_code: bool = False,
    on_work: OnWork = unheard,
    **options: Any,
) -> Diagnosed:
    """Measure how far clients are apart, as `fedcir diagnose` does: in a dataset before any training, or in runs.

    `runs` are one finished run, or two to compare. Without any, `options` say which data to look at, such as
    dataset="pacs", clients=20 or seed=1. `samples` are the images of each domain to measure on: test images of
    a run, else training images. The picture goes into `out`; None draws none. `trust_code` lets a run's own code run.
    """
    paths = [Path(each) for each in ([runs] if isinstance(runs, str | Path) else runs)]
    given = [name for name, value in {**options, "set": set or None}.items() if value is not None]
    if paths and given:
        raise InputError(f"runs bring their own data and settings: leave {' and '.join(given)} out")
    asked = Asked.of({**options, "data_root": data_root}, set=set)
    if samples < 8:
        raise InputError(f"samples must be at least 8, got {samples}")
    picture = None if out is None else Path(out)
    if picture is not None:
        check_picture(picture, projection)
    on_distance = partial(on_work, what="measuring distances")
    if paths:
        found = _of_runs(paths, None if data_root is None else str(data_root), samples, on_distance, trust_code)
    else:
        found = [diagnose_data(asked.config(), samples, on_distance)]
    said = verdict(found[0], *found[1:])
    if picture is not None:
        draw_diagnosis(found, picture, projection)
    return Diagnosed(found, said, picture)


def _of_runs(
    paths: Sequence[Path], data_root: str | None, samples: int, on_distance: Any, trust_code: bool
) -> list[Diagnosis]:
    folders = run_folders(paths)
    if len(folders) > 2:
        raise InputError(f"diagnose takes one run or two, got {len(folders)}: name the ones to look at")
    read = [load_run(folder, trust_code=trust_code) for folder in folders]
    same_data(read, clients=True)
    found = [diagnose_run(run, data_root, samples, on_distance) for run in read]
    if len({each.name for each in found}) < len(found):
        found = [replace(each, name=str(folder)) for each, folder in zip(found, folders, strict=True)]
    return found
