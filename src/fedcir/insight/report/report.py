"""The report of runs as one page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedcir.analysis.diagnose import Diagnosis, diagnose_run
from fedcir.engine.files import write
from fedcir.insight.experiments.experiment import Outcome, Results
from fedcir.insight.report import clients, sections
from fedcir.insight.report.page import Figure, Section, Table, Words, page, sentence
from fedcir.insight.report.study import Study, study_of
from fedcir.runs.compare import compare
from fedcir.runs.run import Source, place_of
from fedcir.types import InputError

SAMPLES = 250
"""Test images of each domain that distances and pictures are made of."""

OnRun = Callable[[int, int], None]


def report(
    runs: Sequence[Source],
    path: Path,
    *,
    title: str | None = None,
    first: Sequence[Section] = (),
    target: float | None = None,
    samples: int = SAMPLES,
    data_root: str | None = None,
    on_run: OnRun | None = None,
    trust_code: bool = False,
) -> tuple[str, ...]:
    """Write the report of finished runs on the same data to a file. Gives what could not be read or measured.

    `first` are sections of the caller's own, before all others. With no samples, no distances are measured.
    `on_run` is told how many runs have been looked at, of how many. Without `trust_code`, nothing is measured in a run
    whose algorithm or model is code of its own.
    """
    study = study_of(runs, trust_code)
    methods = compare(study.runs, study.baseline, target)
    found, why_not = _diagnoses(study, samples, data_root, on_run) if samples else ({}, [])
    hidden = _paths(runs, study, data_root)
    missing = (
        [_sentence(reason, hidden) for reason in why_not]
        if samples
        else ["Not measured, because the number of samples is 0."]
    )
    told = [
        *first,
        sections.next_steps(study, methods),
        sections.results(study, methods, [_sentence(note, hidden) for note in study.notes]),
        sections.training(study, methods),
        clients.by_domain(study, methods, found),
        clients.distances(study, found, samples, missing),
        sections.costs(study, methods, target),
        clients.clients(found),
        sections.settings(study),
    ]
    write(path, page(title or f"{study.dataset}: report", _lead(study), [s for s in told if s], list(study.runs)))
    return *study.notes, *(f"distances {reason}" for reason in why_not)


def reproduction(
    id: str, title: str, outcome: Outcome, results: Results, path: Path, on_run: OnRun | None = None
) -> tuple[str, ...]:
    """The report of a table or figure of the paper; with all else of its runs where only method and seed differ.

    Gives what could not be read or measured.
    """
    figures = [Figure(panel.title or id, {"": panel}) for panel in outcome.panels]
    words = [Words(tuple(outcome.notes))] if outcome.notes else []
    own = Section(id, (Table(title, outcome.rows), *words, *figures))
    runs = list(results.by_name.values())
    datasets = ", ".join(results.datasets)
    if len(results.datasets) == 1 and len(results.points) == 1:
        return report(runs, path, title=f"{id}: {datasets}", first=[own], target=results.target, on_run=on_run)
    rows = [["run", "test accuracy (%)"]]
    rows += [[run.path.name, f"{100 * run.final['accuracy_mean']:.2f}"] for run in runs]
    again = "The folder settings holds one file for each run. To repeat a run: `fedcir run FILE.toml`."
    listed = Section("Runs", (Words((again,)), Table("After the last round, mean over domains", rows)))
    lead = sentence(f"{title} ({datasets}; {_many(len(runs), 'run')})")
    write(path, page(f"{id}: {datasets}", lead, [own, listed], results.algorithms))
    return ()


def _lead(study: Study) -> str:
    run = next(iter(study.one_of_each.values()))
    config = run.config
    trained = sum(bool(client.get("train")) for client in run.manifest["clients"])
    runs = sum(len(by_seed) for by_seed in study.runs.values())
    parts = [
        f"{_many(len(study.runs), 'method')} on {study.dataset}",
        f"{_many(trained, 'client')}",
        f"{_many(config.server.rounds, 'round')} of {_many(config.local.steps, 'local step')}",
        f"{_many(len(study.seeds), 'seed')}, {_many(runs, 'run')}",
    ]
    return "; ".join(parts) + "."


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _diagnoses(
    study: Study, samples: int, data_root: str | None, on_run: OnRun | None
) -> tuple[dict[str, dict[int, Diagnosis]], list[str]]:
    """Of every run whose data are there and allow it; and of which others not, and why."""
    found: dict[str, dict[int, Diagnosis]] = {}
    failed: dict[str, list[tuple[str, str]]] = {}
    runs = [(name, seed, run) for name, by_seed in study.runs.items() for seed, run in by_seed.items()]
    for done, (name, seed, run) in enumerate(runs, start=1):
        try:
            found.setdefault(name, {})[seed] = made = diagnose_run(run, data_root, samples)
            why = made.unmeasured
        except (InputError, OSError) as error:
            why = str(error)
        if why:
            alike = why.replace(str(run.path), "")  # what is wrong with all of them is said once
            failed.setdefault(alike, []).append((run.path.name, why))
        if on_run is not None:
            on_run(done, len(runs))
    reasons = []
    for each in failed.values():
        of = "" if len(each) == len(runs) else f" for {', '.join(name for name, _ in each)}"
        reasons.append(f"not measured{of}: {each[0][1]}")
    return {name: by_seed for name, by_seed in found.items() if by_seed}, reasons


def _paths(runs: Sequence[Source], study: Study, data_root: str | None) -> dict[str, str]:
    """Paths of this machine, and what stands for them on a page that is sent to others."""
    roots = [data_root, *(run.config.data.root for run in study.one_of_each.values())]
    hidden = {place: place.name for place in map(place_of, runs)} | {Path(root): "DIR" for root in roots if root}
    return {str(path): name for path, name in hidden.items() if len(path.parts) > 1}


def _sentence(text: str, hidden: Mapping[str, str]) -> str:
    for path in sorted(hidden, key=len, reverse=True):
        text = text.replace(path, hidden[path])
    return sentence(text)
