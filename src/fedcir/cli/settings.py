"""`fedcir algorithms`, `settings`, `init`, `recommend` and `tune`: which settings there are, and which ones to take."""

import shutil
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcir.cli import options as cli
from fedcir.cli.application import Interrupted, print_json, print_table
from fedcir.cli.options import Options, argument, flag, option, output, setting, split_seeds, take_options
from fedcir.config import DataConfig, dump_toml
from fedcir.errors import InputError
from fedcir.types import ACCURACY

if TYPE_CHECKING:
    from fedcir.experiments.recommendation import CandidateResult
    from fedcir.experiments.tuning import Trial, Tuning


def algorithms(
    name: str | None = argument("Algorithm to show in full.", None),
    check: bool = flag("--check", "Check that NAME keeps the guarantees of every algorithm."),
    json: bool = flag("--json", "Print as JSON."),
) -> None:
    """List the algorithms, or show the fields of one. NAME may be a file such as ./mine.py."""
    from fedcir.algorithms import find_algorithm, list_algorithms
    from fedcir.experiments.reference import describe_algorithm, measure_traffic

    if check:
        _check_algorithm(name)
        return
    described = [describe_algorithm(find_algorithm(item)) for item in ([name] if name else list_algorithms())]
    traffic = measure_traffic(find_algorithm(name)()) if name else {}
    if json:
        print_json({**described[0], **traffic} if name else described)
    elif name:
        only = described[0]
        print(f"{only['class']}: {only['idea']}\n{only['citation']}\n")
        for way, groups in traffic.items():
            sizes = ", ".join(f"{group} {size:,} bytes" for group, size in groups.items())
            print(f"{way + ':':7}{sizes or 'nothing'}")
        print(f"{'keeps:':7}{', '.join(only['keeps']) or 'nothing'} (at the client)")
        if only["defaults"]:
            made_for = ", ".join(f"{setting}={value}" for setting, value in only["defaults"].items())
            print(f"{'sets:':7}{made_for} (unless you set them otherwise)")
        print("(bytes per client and round, for resnet18 with 10 classes)\n")
        rows = [[f["name"], f["takes"], str(f["default"]), f["doc"], f["tried"]] for f in only["fields"]]
        print_table([["field", "takes", "default", "meaning", "tune tries"], *rows])
    else:
        print_table([["algorithm", "idea"]] + [[item["name"], item["idea"]] for item in described])


def _check_algorithm(name: str | None) -> None:
    """Run the conformance checks and print a line for each."""
    from fedcir.algorithms import find_algorithm
    from fedcir.cli.progress import Meter
    from fedcir.conformance import CHECKS, Subject, find_fault

    if name is None:
        raise InputError("--check needs the name or the file of an algorithm, such as ./mine.py")
    subject, failed = Subject(find_algorithm(name)()), 0
    with Meter("checking", quiet=False) as meter:
        for number, check in enumerate(CHECKS):
            meter.show(number, len(CHECKS), f"checking {check.__name__}")
            fault = find_fault(check, subject)
            meter.close()  # before printing, so that the bar does not overwrite the line
            failed += fault is not None
            print(f"ok      {check.__name__}" if fault is None else f"FAILED  {check.__name__}: {fault}", flush=True)
    if failed:
        raise InputError(f"{name} breaks {failed} of {len(CHECKS)} guarantees")


def settings(
    name: str | None = argument("A section such as local, or a setting such as local.lr.", None),
    json: bool = flag("--json", "Print as JSON."),
) -> None:
    """List all settings, with their values, defaults and meanings."""
    from fedcir.experiments.reference import list_settings

    listed = list_settings(name)
    if json:
        print_json([asdict(entry) for entry in listed])
        return
    width = min(100, shutil.get_terminal_size().columns)
    for entry in listed:
        default = f"; default {entry.default_text}{entry.made_for_text}" if entry.default_text else ""
        print(f"{entry.name}: {entry.takes}{default}{f'; {entry.option}' if entry.option else ''}")
        print(textwrap.fill(entry.meaning, width, initial_indent="    ", subsequent_indent="    "))


def init(
    folder: Path = argument(
        "Your data: DIR/<domain>/<class>/<image>, or <site>.csv, <site>.npz, masks.", metavar="DIR"
    ),
    out: Path = output("File for the settings.", Path("fedcir.toml")),
    dataset: str | None = setting("dataset"),
    set: list[str] | None = cli.SET,
    force: bool = flag("--force", "Write over an older file."),
    quiet: bool = flag("--quiet", "Show nothing."),
) -> None:
    """Write settings for your own data. Looks at all of them, gives a reason for each setting, and trains nothing."""
    from fedcir.cli.progress import Watch
    from fedcir.experiments.starter import check_output_path
    from fedcir.experiments.starter import init as inspect_images

    check_output_path(out, DataConfig(root=str(folder)), force)
    with Watch(quiet) as watch:
        starter = inspect_images(folder, dataset=dataset, set=set or (), on_work=watch.work)
    starter.save(out, force)
    if not quiet:
        for sentence in starter.findings:
            print(sentence)
        print(f"\n{out} says why each of these was chosen:")
        for choice in starter.choices:
            print(f"    {choice.setting} = {dump_toml({'is': choice.value}).removeprefix('is = ').rstrip()}")
        print(f"\nNext: `fedcir run {out}`, or `fedcir compare {out}` to see what the choice brings.")


@take_options("dataset", "data_root", "image_size", "model", "clients", "active", "beta", "workers")
def recommend(
    config: Path | None = cli.CONFIG,
    settings: Any = None,
    pilot_rounds: int = option("Rounds to try each candidate for.", 20),
    seeds: str = option("Seeds to try each candidate with, at least two.", "0,1,2"),
    out: Path | None = output("File for the settings, such as fedcir.toml."),
    quiet: bool = cli.NO_PROGRESS,
    json: bool = cli.JSON_NUMBERS,
    set: list[str] | None = cli.SET,
) -> None:
    """Find out what to run on your data. Tries each candidate for a few rounds and never looks at a test image."""
    from fedcir.cli.progress import Watch
    from fedcir.experiments.recommendation import recommend as try_candidates

    if out is not None and out.exists():
        raise InputError(f"{out} exists: name a new file")
    with Watch(quiet) as watch:
        keywords = {**settings, "config": config, "set": set or (), "on_work": watch.work, "on_note": watch.note}
        result = try_candidates(pilot_rounds=pilot_rounds, seeds=split_seeds(seeds) or (), **keywords)
    if out is not None:
        result.save(out)
    if json:
        rows = {"candidates": result.to_rows(), "findings": list(result.findings), "reason": result.reason}
        print_json({**rows, "settings": result.tables})
        return
    for sentence in result.findings:
        print(sentence)
    print()
    first = result.trials[0].candidate.name
    metric = result.choice.metric
    cover = "95 %, seeds and validation images" if metric == ACCURACY else "95 %, seeds"
    header = ["candidate", "what it is", "mean", "worst", f"difference to {first} ({cover})"]
    unit = " (%)" if metric.is_share else ""
    title = f"{metric.title} on validation images{unit}, rounds: {pilot_rounds}, seeds: {len(result.seeds)}"
    print_table([header, *(_format_row(trial) for trial in result.trials)], title)
    print(result.reason)
    if out is None:
        print("Write these settings to a file with `--out fedcir.toml`.")
    else:
        print(f"{out} holds these settings. Next: `fedcir run {out}`.")


def _format_row(trial: "CandidateResult") -> list[str]:
    from fedcir.reporting.methods import format_estimate

    difference, metric = "", trial.metric
    if trial.difference is not None and (half_width := trial.difference.half_width) is not None:
        difference = f"{metric.format_change(trial.difference.mean)} ± {metric.format(half_width)}"
    candidate, estimates = trial.candidate, (trial.mean, trial.worst)
    return [candidate.name, candidate.about, *(format_estimate(estimate, metric) for estimate in estimates), difference]


@take_options(without=("report", "track", "profile"))
def tune(
    algorithm: str | None = cli.ALGORITHM,
    seed: int | None = cli.SEED,
    trials: int | None = option("Trials in all, each a run. [default: 12]"),
    space: list[str] | None = option(
        "What to try, such as local.lr=1e-3..1e-1 or algorithm.mu=0.1,0.5; may be repeated.",
        metavar="SECTION.FIELD=VALUES",
    ),
    *,
    options: Options,
) -> None:
    """Search for good settings of one algorithm. Judges them on validation images and never looks at a test image."""
    from fedcir.cli.progress import Watch
    from fedcir.experiments.tuning import tune as search

    notes = []
    with Watch(options.quiet) as watch:

        def note(text: str) -> None:
            notes.append(text)
            watch.note(text)

        def show(trial: "Trial") -> None:
            watch.close()
            if not options.quiet:
                settings = ", ".join(f"{name}={value}" for name, value in trial.settings.items())
                print(f"trial {trial.number}: {_describe_result(trial)}  {settings}", file=sys.stderr)

        keywords = {**options.keywords(), "algorithm": algorithm, "seed": seed, "trials": trials}
        try:
            tuning = search(space=space or (), on_work=watch.work, on_note=note, on_trial=show, **keywords)
        except KeyboardInterrupt:
            if not notes:  # no trial has started
                raise
            raise Interrupted("finished trials are saved; continue with the same command and --resume") from None
    if options.json:
        print_json({"trials": tuning.to_rows(), "importances": tuning.importances, "out": str(tuning.out)})
    elif not options.quiet:
        _print_tuning(tuning)


def _print_tuning(tuning: "Tuning") -> None:
    metric = tuning.metric
    rows = [["trial", *tuning.space, "mean", "worst", ""]]
    for trial in tuning.trials:
        mean, worst = metric.format(trial.score), metric.format(trial.worst)
        remark = "best" if trial is tuning.best else "" if trial.state == "done" else _describe_result(trial)
        rows.append([str(trial.number), *(f"{value}" for value in trial.settings.values()), mean, worst, remark])
    title = f"{metric.title} on validation images{' (%)' if metric.is_share else ''}"
    print_table(rows, f"{title}, {tuning.config.algorithm.name} on {tuning.config.data.name}")
    print(tuning.reason)
    if tuning.importances:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in tuning.importances.items())
        print(f"What mattered, as shares in how the scores differ: {shares}.")
    print(f"\n{tuning.out} holds best.toml, trials.png and trials.jsonl. Next: `fedcir run {tuning.out}/best.toml`.")


def _describe_result(trial: "Trial") -> str:
    if trial.state == "failed":
        return f"failed: {trial.why}"
    if trial.state == "done" and trial.score is not None:
        return trial.metric.show(trial.score)
    return f"stopped after round {trial.rounds[-1]}"
