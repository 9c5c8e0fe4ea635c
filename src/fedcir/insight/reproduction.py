"""A table or figure of the paper: the plan of its runs, and what they come to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedcir.algorithms import asked_config
from fedcir.config import Asked, Config, cores, merged, nearest
from fedcir.config.presets import names as presets
from fedcir.data.catalogue import SOURCES
from fedcir.data.federation import Federation
from fedcir.engine.files import write
from fedcir.insight.experiments import experiment
from fedcir.insight.experiments.experiment import SCALES, Case, Experiment, Outcome, Results
from fedcir.insight.experiments.plan import cases, estimates, locate
from fedcir.insight.report import tables
from fedcir.insight.report.plots import draw
from fedcir.insight.report.report import reproduction
from fedcir.insight.report.write import MEASURING
from fedcir.runs import batch
from fedcir.runs.batch import OnNote, OnProgress, OnWork, unheard
from fedcir.runs.places import place_for
from fedcir.runs.request import BatchRequest, request_path, require_runs
from fedcir.runs.run import Run
from fedcir.runs.sweep import Job, longest_first
from fedcir.types import InputError

SCALE = "small"


@dataclass(frozen=True)
class Reproduction:
    """A table or figure, made."""

    id: str
    title: str
    outcome: Outcome
    runs: Mapping[str, Run]
    """The runs that ended well, by name."""
    failures: Mapping[str, str]
    """Why the others failed, by name."""
    out: Path
    page: Path | None
    """The report, if there is one."""

    @property
    def failed(self) -> str:
        """What went wrong, in a line; empty if nothing did."""
        return batch.told_failures(self.failures, len(self.runs) + len(self.failures)) if self.failures else ""


@dataclass(frozen=True)
class Plan:
    """The runs that a table or figure takes, checked and ready to begin."""

    id: str
    experiment: Experiment
    cases: Sequence[Case]
    jobs: Mapping[str, Job]
    """By the case's name."""
    data: Mapping[str, Federation]
    """Of the runs that are left, by the dataset's name."""
    out: Path
    workers: int
    """Runs at a time."""
    resume: bool
    track: str | None
    target: float | None

    @cached_property
    def left(self) -> list[Job]:
        """The runs that were not done when it was made, the longest first."""
        return longest_first([job for job in self.jobs.values() if not job.done])

    @cached_property
    def estimates(self) -> list[float]:
        """About how many seconds each of those takes with one worker."""
        return estimates(self.left, self.data)

    @property
    def seconds(self) -> float:
        """About how long those will take."""
        return sum(self.estimates) / self.workers

    def hand_out(self) -> list[dict[str, Any]]:
        """The runs that are left, for others to do, such as the scheduler of a cluster; their settings are written.

        Each is a command for this working directory, its folder, and about how many seconds it takes with one worker.
        Once they are done, a resumed reproduction only makes its table or figure.
        """
        runs = []
        for job, seconds in zip(self.left, self.estimates, strict=True):
            job.write_settings()
            command = ["fedcir", *job.command(resume=True)]
            runs.append({"command": command, "out": str(job.out), "seconds": round(seconds, 1)})
        return runs

    def carry_out(
        self,
        report: bool = True,
        on_progress: OnProgress = unheard,
        on_work: OnWork = unheard,
        on_note: OnNote = unheard,
    ) -> Reproduction:
        """Do the runs that are left and write what came out."""
        jobs = list(self.jobs.values())
        runs, failures = batch.run_all(jobs, self.workers, self.resume, self.track, on_progress)
        results = Results(self.cases, runs, self.target)
        id, title, outcome = self.id, self.experiment.title, self.experiment.outcome(results)
        outcome = replace(outcome, notes=[*outcome.notes, *results.chance_notes()])
        _write(id, title, outcome, self.out)
        page = self.out / "report.html" if report else None
        if page is not None:
            for note in reproduction(id, title, outcome, results, page, partial(on_work, what=MEASURING)):
                on_note(f"{page.name}: {note}")
        return Reproduction(id, title, outcome, runs, failures, self.out, page)


def reproduce(
    id: str,
    *,
    report: bool = True,
    on_progress: OnProgress = unheard,
    on_work: OnWork = unheard,
    on_note: OnNote = unheard,
    **asked: Any,
) -> Reproduction:
    """Make a table or figure of the paper, as `fedcir reproduce` does: "table1", "fig-risk" and so on.

    `asked` are the keywords of `fedcir.insight.reproduction.plan`: scale, algorithms, seeds, target, out, resume,
    preset, config, set, and the options of the command, such as dataset="pacs" or workers=2. A run that fails leaves
    the others as they are, and is among `failures`; if all do, that is a RunError.
    """
    return plan(id, on_work=on_work, on_note=on_note, **asked).carry_out(report, on_progress, on_work, on_note)


def plan(
    id: str,
    *,
    scale: str | None = None,
    algorithms: Sequence[str | Path] | None = None,
    seeds: Sequence[int] | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    preview: bool = False,
    track: str | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    set: Sequence[str] | Mapping[str, Any] = (),
    on_work: OnWork = unheard,
    on_note: OnNote = unheard,
    **options: Any,
) -> Plan:
    """Which runs it takes, with what is wrong found before any of them starts.

    `scale` is smoke (a minute), small (hours on 2 cores; the default) or paper (its own settings, days). `resume`
    continues what is in `out`, with its settings unless others are given. A `preview` starts nothing: `out` may hold
    some of the runs, or none. Methods and seeds are the
    paper's if not given, without those that do not go with the settings; `target` is an accuracy to reach (table3).
    """
    made = experiment(id)
    batch.check_target(target)
    if target is not None and id != "table3":
        raise InputError(f"only table3 takes a target, {id} does not: leave it out")
    if scale is not None and scale not in SCALES:
        raise InputError(f"no scale {scale!r}; {nearest(scale, SCALES)}")
    request = BatchRequest(
        Asked.of(options, preset, config, set, without=("algorithm", "seed")),
        None if algorithms is None else batch.chosen_algorithms(algorithms),
        None if seeds is None else batch.chosen_seeds(seeds),
        target,
        {} if scale is None else {"scale": scale},
    )
    place = place_for(out, Path("runs", f"{id}-{scale or SCALE}"), resume or preview)
    if resume:
        require_runs(place, "runs")
        request = request.resume(place, id)
    asked, chosen, numbers, target = request.asked, request.algorithms, request.seeds, request.target
    scale, resume = request.more.get("scale", SCALE), resume or preview
    if scale not in SCALES:
        raise InputError(f"{request_path(place, id)} names no scale, but {scale!r}: delete the file, or restore it")
    given = asked.tables()
    roots = _datasets(given.get("data", {}), scale, made.datasets, on_note)
    planned = cases(made, scale, list(roots), chosen, numbers, given)
    jobs = {case.name: Job(_config(asked, case, scale, roots), place / case.name) for case in planned}
    if len(jobs) < len(planned):
        raise InputError(f"two runs of {id} would have the same name: leave one of the methods out")
    needed = batch.required(made.algorithms if made.fixed else chosen or ())
    ready = batch.prepare(list(jobs.values()), resume, track, needed, on_work, on_note)
    kept = [case for case in planned if case.algorithm not in ready.left_out]
    jobs = {case.name: jobs[case.name] for case in kept}
    workers = cores() if options.get("workers") is None else options["workers"]
    if not preview:
        request.save(place, id)
    return Plan(id, made, kept, jobs, ready.data, place, workers, resume, track, target)


def _datasets(
    given: Mapping[str, Any], scale: str, papers: tuple[str, ...], on_note: OnNote
) -> Mapping[str, str | None]:
    """The datasets by name and where each lies: those asked for, at smoke scale the embedded one, or the paper's."""
    asked = [name.strip() for name in given.get("name", "").split(",") if name.strip()]
    root = given.get("root")
    if not asked and scale == "smoke" and root is None:
        return {"minidigits": None}
    if len(asked) == 1:
        return {asked[0]: root}
    if root is None:
        names = ", ".join(asked or papers)
        raise InputError(f"data.root is missing: give a folder that holds {names}, or name one dataset")
    found = locate(asked or papers, Path(root))
    if missing := [name for name in asked or papers if name not in found]:
        if asked:
            raise InputError(f"{root} holds no folder for {missing[0]}")
        on_note(f"left out because {root} does not hold them: {', '.join(missing)}")
    return {name: str(path) for name, path in found.items()}


def _config(asked: Asked, case: Case, scale: str, roots: Mapping[str, str | None]) -> Config:
    preset = asked.preset or (case.dataset if case.dataset in presets() else None)
    base = {section: dict(values) for section, values in SCALES[scale].items()}
    if case.dataset in SOURCES and SOURCES[case.dataset].arrays is not None:  # they have a size of their own
        base.get("data", {}).pop("image_size", None)
    place = {"dataset": case.dataset, "data_root": roots[case.dataset]}
    own = replace(asked.over(**place, algorithm=case.algorithm, seed=case.seed), preset=preset)
    return asked_config(own, merged(base, case.point.settings))


def _write(id: str, title: str, outcome: Outcome, out: Path) -> None:
    notes = "".join(f"\n{note}\n" for note in outcome.notes)
    write(out / f"{id}.md", f"{title[0].upper()}{title[1:]}.\n\n{tables.markdown(outcome.rows)}{notes}")
    write(out / f"{id}.tex", tables.latex(outcome.rows))
    write(out / f"{id}.csv", tables.comma_separated(outcome.numbers))
    draw(outcome.panels, [out / f"{id}.{end}" for end in ("png", "pdf", "svg")])
