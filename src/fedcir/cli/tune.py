"""`fedcir tune`: which values of its settings suit an algorithm on some data."""

import json as jsonlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcir.cli.interrupt import Interrupted
from fedcir.cli.options import Options, option, with_options
from fedcir.cli.tables import print_table

if TYPE_CHECKING:
    from fedcir.insight.attempts import Attempt
    from fedcir.insight.tuned import Tuning


@partial(with_options, without=("report", "track", "profile"))
def tune(
    options: Options,
    algorithm: Annotated[str | None, option("algorithm")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    trials: Annotated[int | None, typer.Option(help="Trials in all, each a run. [default: 12]")] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION.FIELD=VALUES",
            help="What to try, such as local.lr=1e-3..1e-1 or algorithm.mu=0.1,0.5; may be repeated.",
        ),
    ] = None,
) -> None:
    """Search for good settings of one algorithm. Judges them on validation images and never looks at a test image."""
    from fedcir.cli.progress import Watch
    from fedcir.insight.tune import tune as search

    begun = []
    with Watch(options.quiet) as watch:

        def note(text: str) -> None:
            begun.append(text)
            watch.note(text)

        def show(trial: "Attempt") -> None:
            watch.close()
            if not options.quiet:
                settings = ", ".join(f"{name}={value}" for name, value in trial.settings.items())
                print(f"trial {trial.number}: {_result(trial)}  {settings}", file=sys.stderr)

        keywords = {name: value for name, value in options.keywords().items() if name not in ("report", "track")}
        given: dict[str, Any] = {**keywords, "algorithm": algorithm, "seed": seed, "trials": trials}
        try:
            tuning = search(space=space or (), on_work=watch.work, on_note=note, on_trial=show, **given)
        except KeyboardInterrupt:
            if not begun:
                raise
            raise Interrupted("finished trials are saved; continue with the same command and --resume") from None
    if options.json:
        told = {"trials": tuning.to_rows(), "importances": tuning.importances, "out": str(tuning.out)}
        print(jsonlib.dumps(told, indent=1, ensure_ascii=False))
    elif not options.quiet:
        _print(tuning)


def _print(tuning: "Tuning") -> None:
    rows = [["trial", *tuning.space, "mean", "worst", ""]]
    for trial in tuning.trials:
        tested = [trial.score, trial.worst] if trial.accuracy else []
        mean, worst = [f"{100 * (each or 0):.1f}" for each in tested] or ["", ""]
        said = "best" if trial is tuning.best else "" if trial.state == "done" else _result(trial)
        rows.append([str(trial.number), *(f"{value}" for value in trial.settings.values()), mean, worst, said])
    print_table(rows, f"accuracy on validation images (%), {tuning.config.algorithm.name} on {tuning.config.data.name}")
    print(tuning.reason)
    if tuning.importances:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in tuning.importances.items())
        print(f"What mattered, as shares in how the accuracies differ: {shares}.")
    print(f"\n{tuning.out} holds best.toml, trials.png and trials.jsonl. Next: `fedcir run {tuning.out}/best.toml`.")


def _result(trial: "Attempt") -> str:
    if trial.state == "failed":
        return f"failed: {trial.why}"
    return f"{trial.score:.1%}" if trial.state == "done" else f"stopped after round {trial.rounds[-1]}"
