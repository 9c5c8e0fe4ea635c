"""The command line: arguments in, calls out."""

import json as jsonlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcir.options import Options, with_options

if TYPE_CHECKING:
    from fedcir.config import AlgorithmConfig
    from fedcir.records import RunFolder

app = typer.Typer(
    help="Train one classifier across sites whose data look different, without moving the data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Datasets: which there are, and what they look like.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.command()
@with_options
def run(
    options: Options,
    algorithm: Annotated[
        str | None, typer.Option(help="Method by name, or a file ./mine.py. [default: fedcir]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random. [default: 0]")] = None,
) -> None:
    """Train one method. Without arguments: FedCiR on the embedded dataset."""
    from fedcir.progress import Display
    from fedcir.simulate import open_run

    config = options.to_config(algorithm, seed)
    name = f"{config.data.name}-{Path(config.algorithm.name).stem}-{config.run.seed}"
    out = options.out or Path("runs", name)
    with open_run(config, out, options.resume) as (session, rounds):
        if session.finished and not options.quiet:
            print(f"{out} is finished already, after round {session.state.round}", file=sys.stderr)
        with Display(options.quiet) as display:
            display.begin(name, session.config.server.rounds)
            try:
                for record in rounds:
                    display.show(name, record)
            except KeyboardInterrupt:
                rounds.close()
                raise Interrupted(f"round {session.state.round} is saved; continue with --resume --out {out}") from None
        summary = session.folder.summary() if session.folder is not None else {}
    if options.json:
        print(jsonlib.dumps(summary))
    elif not options.quiet:
        _print_summary(summary)
        print(f"\nkept in {out}")


@app.command()
@with_options
def compare(
    options: Options,
    algorithms: Annotated[
        str, typer.Option(help="Methods, comma-separated, or all.")
    ] = "fedavg,fedreg,fedalign,fedcir",
    seeds: Annotated[str, typer.Option(help="Seeds, comma-separated.")] = "0",
    target: Annotated[float | None, typer.Option(help="Accuracy to reach; by default the baseline's last.")] = None,
    workers: Annotated[int | None, typer.Option(help="Runs at a time; as many as there are cores by default.")] = None,
) -> None:
    """Train several methods on the same clients, splits and batches, and put them side by side."""
    from dataclasses import asdict

    from fedcir.compare import compare as compare_runs
    from fedcir.records import RunFolder, write
    from fedcir.report import tables
    from fedcir.report.plots import convergence
    from fedcir.types import InputError

    if target is not None and not 0 < target < 1:
        raise InputError(f"--target is an accuracy between 0 and 1, got {target}")
    names, numbers = _algorithms(algorithms), _seeds(seeds)
    out = options.out or Path("runs", "compare")
    jobs = {(name, seed): out / f"{Path(name).stem}-{seed}" for seed in numbers for name in names}
    _run_all(options, jobs, (os.cpu_count() or 1) if workers is None else workers)
    runs = {Path(name).stem: {seed: RunFolder(jobs[name, seed]) for seed in numbers} for name in names}
    baseline = "fedavg" if "fedavg" in runs else next(iter(runs))
    methods = compare_runs(runs, baseline, target)
    rows = tables.comparison_rows(methods, baseline, len(numbers), target)
    convergence(runs, out / "curves.png")
    write(out / "comparison.md", tables.markdown(rows))
    write(out / "comparison.tex", tables.latex(rows))
    write(out / "comparison.csv", tables.comma_separated(tables.comparison_numbers(methods)))
    write(out / "comparison.json", jsonlib.dumps([asdict(method) for method in methods], indent=1) + "\n")
    if options.json:
        print((out / "comparison.json").read_text(encoding="utf-8"), end="")
    elif not options.quiet:
        _print_table(rows, f"test accuracy after the last round (%), {len(numbers)} seed{'s' * (len(numbers) > 1)}")
        print(f"\n{out} holds curves.png, comparison.md, .csv, .tex and .json, and the runs")


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="A method to show in full.", show_default=False)] = None,
    check: Annotated[bool, typer.Option("--check", help="Check that it keeps the promises of every method.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the methods, or show one's fields. NAME may be a file such as ./mine.py."""
    from fedcir.algorithms import algorithm_class, names
    from fedcir.describe import describe, travels

    if check:
        _check(name)
        return
    described = [describe(algorithm_class(each)) for each in ([name] if name else names())]
    if json:
        one = {**described[0], **travels(algorithm_class(name)())} if name else None
        print(jsonlib.dumps(one or described, indent=1))
    elif name:
        only = described[0]
        print(f"{only['class']}: {only['idea']}\n{only['citation']}\n")
        moved = travels(algorithm_class(name)())
        for way, groups in moved.items():
            sizes = ", ".join(f"{group} {size:,} bytes" for group, size in groups.items())
            print(f"{way + ':':7}{sizes or 'nothing'}")
        print(f"{'keeps:':7}{', '.join(only['keeps']) or 'nothing'} (at the client)")
        print("(a client's bytes in a round, resnet18 with 10 classes)\n")
        _print_table(
            [["field", "default", "meaning"]] + [[f["name"], str(f["default"]), f["doc"]] for f in only["fields"]]
        )
    else:
        _print_table([["method", "idea"]] + [[each["name"], each["idea"]] for each in described])


@data_app.command("list")
def data_list(json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List the datasets."""
    from fedcir.data.sources import SOURCES

    if json:
        print(jsonlib.dumps({name: source.about for name, source in SOURCES.items()}, indent=1))
    else:
        _print_table([["dataset", "what it is"]] + [[name, source.about] for name, source in SOURCES.items()])


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(help="Name of the dataset.")],
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the dataset.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write the picture. [default: NAME.png]")
    ] = None,
) -> None:
    """Draw a contact sheet: domains as rows, classes as columns."""
    from fedcir.config import DataConfig
    from fedcir.data.sheet import contact_sheet
    from fedcir.data.sources import open_dataset

    domains = open_dataset(DataConfig(name=name, root=None if data_root is None else str(data_root)), seed=0)
    path = out or Path(f"{name}.png")
    contact_sheet(domains).save(path, format="PNG")
    rows = [["domain", "train", "test"]] + [[d.name, str(len(d.train)), str(len(d.test))] for d in domains]
    _print_table(rows, f"{len(domains.classes)} classes, {domains.image_shape[0]}x{domains.image_shape[1]} pixels")
    print(f"\ncontact sheet in {path}")


class Interrupted(Exception):
    """The user asked to stop; the message says how to go on."""


def main() -> None:
    """Run a command; turn what went wrong into one line and an exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except Interrupted as stop:
        _fail(str(stop), 130)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except OSError as error:
        if error.filename is None and error.strerror is None:
            raise
        _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 2)
    except Exception as error:
        from_parser = getattr(error, "format_message", None)
        if type(error).__name__ == "NoArgsIsHelpError" and from_parser is not None:
            print(from_parser())
            sys.exit(0)
        if from_parser is not None:
            _fail(from_parser() + _given(error), 2)
        if type(error).__name__ == "Abort":
            _fail("interrupted", 130)
        if _is_input_error(error):
            _fail(str(error), 2)
        raise


def _check(name: str | None) -> None:
    """Run the conformance checks, a line each."""
    from fedcir.algorithms import algorithm_class
    from fedcir.conformance import CHECKS, Failure
    from fedcir.types import InputError

    if name is None:
        raise InputError("--check needs the name or the file of a method")
    algorithm, failed = algorithm_class(name)(), 0
    for promise in CHECKS:
        try:
            promise(algorithm)
        except Failure as failure:
            failed += 1
            print(f"FAILED  {promise.__name__}: {failure}")
        else:
            print(f"kept    {promise.__name__}")
    if failed:
        raise InputError(f"{name} breaks {failed} of {len(CHECKS)} promises")


def _is_input_error(error: Exception) -> bool:
    from fedcir.types import InputError

    return isinstance(error, InputError)


def _given(error: Exception) -> str:
    """The value behind a parser's complaint, which does not always name it."""
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for word, following in reversed(list(zip(sys.argv, [*sys.argv[1:], ""], strict=True))):  # the last one counts
            if word == option or word.startswith(f"{option}="):
                return f", got {following if word == option else word.partition('=')[2]!r}"
    return ""


def _fail(message: str, code: int) -> None:
    print(f"fedcir: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _algorithms(text: str) -> list[str]:
    from fedcir.algorithms import algorithm_class, names
    from fedcir.types import InputError

    chosen = names() if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        algorithm_class(name)
    if not chosen:
        raise InputError("--algorithms names none; give some, comma-separated, or all")
    stems = [Path(name).stem for name in chosen]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise InputError(f"--algorithms names {twice!r} twice")
    return chosen


def _seeds(text: str) -> list[int]:
    from fedcir.types import InputError

    try:
        return sorted({int(seed) for seed in text.split(",")})
    except ValueError:
        raise InputError(f"--seeds takes whole numbers such as 0,1,2, got {text!r}") from None


def _run_all(options: Options, jobs: "dict[tuple[str, int], Path]", workers: int) -> None:
    """Do the runs that are not finished yet, showing how they go."""
    from fedcir.progress import Display
    from fedcir.records import RunFolder
    from fedcir.sweep import Job, sweep

    planned = [Job(options.to_config(name, seed), path) for (name, seed), path in jobs.items()]
    for job in planned:
        _check_fields(job.config.algorithm)
    if not options.resume:
        _refuse_runs([RunFolder(job.out) for job in planned])
    with Display(options.quiet) as display:
        try:
            for step in sweep(planned, workers, options.resume):
                if step.event == "begun":
                    display.begin(step.job.out.name, step.job.config.server.rounds)
                elif step.record is not None:
                    display.show(step.job.out.name, step.record)
        except KeyboardInterrupt:
            raise Interrupted("rounds are saved; continue with the same command and --resume") from None


def _check_fields(algorithm: "AlgorithmConfig") -> None:
    """A field that one of several methods lacks is found before any of them starts."""
    from fedcir.algorithms import make_algorithm
    from fedcir.types import InputError

    try:
        make_algorithm(algorithm)
    except InputError as error:
        raise InputError(f"{algorithm.name}: {error}; set one method's by --set algorithms.NAME.FIELD=VALUE") from None


def _refuse_runs(folders: "list[RunFolder]") -> None:
    from fedcir.types import InputError

    for folder in folders:
        if folder.exists:
            raise InputError(f"{folder.path} holds a run already: continue it with --resume, or give another --out")


def _print_summary(summary: dict[str, Any]) -> None:
    final, best = summary["final"], summary["best"]
    domains = list(final["accuracy"])
    rows = [["", *domains, "mean", "weighted", "worst"]]
    for title, each in ((f"last round, {final['round']}", final), (f"best round, {best['round']}", best)):
        values = [*each["accuracy"].values(), each["accuracy_mean"], each["accuracy_weighted"], each["accuracy_worst"]]
        rows.append([title, *(f"{100 * value:.1f}" for value in values)])
    _print_table(
        rows, f"{summary['algorithm']} on {summary['dataset']}, test accuracy (%); best is picked on test data"
    )


def _print_table(rows: list[list[str]], title: str | None = None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)
