"""`fedcir algorithms`: which algorithms there are, and whether one keeps the promises."""

import json as jsonlib
from typing import Annotated

import typer

from fedcir.cli.tables import print_table


def algorithms(
    name: Annotated[str | None, typer.Argument(help="Algorithm to show in full.", show_default=False)] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check that NAME keeps the promises of every algorithm.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the algorithms, or show the fields of one. NAME may be a file such as ./mine.py."""
    from fedcir.algorithms import algorithm_class, names
    from fedcir.insight.describe import describe, travels

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
        if only["defaults"]:
            made_for = ", ".join(f"{setting}={value}" for setting, value in only["defaults"].items())
            print(f"{'sets:':7}{made_for} (unless you set them otherwise)")
        print("(bytes per client and round, for resnet18 with 10 classes)\n")
        rows = [[f["name"], f["takes"], str(f["default"]), f["doc"], f["tried"]] for f in only["fields"]]
        print_table([["field", "takes", "default", "meaning", "tune tries"], *rows])
    else:
        print_table([["algorithm", "idea"]] + [[each["name"], each["idea"]] for each in described])


def _check(name: str | None) -> None:
    """Run the conformance checks, a line each."""
    from fedcir.algorithms import algorithm_class
    from fedcir.cli.progress import Meter
    from fedcir.conformance import CHECKS, fault
    from fedcir.types import InputError

    if name is None:
        raise InputError("--check needs the name or the file of an algorithm, such as ./mine.py")
    algorithm, failed = algorithm_class(name)(), 0
    with Meter("checking", quiet=False) as meter:
        for number, promise in enumerate(CHECKS):
            meter.show(number, len(CHECKS), f"checking {promise.__name__}")
            broken = fault(promise, algorithm)
            meter.close()  # so that the line stands where the bar was
            failed += broken is not None
            print(
                f"kept    {promise.__name__}" if broken is None else f"FAILED  {promise.__name__}: {broken}", flush=True
            )
    if failed:
        raise InputError(f"{name} breaks {failed} of {len(CHECKS)} promises")
