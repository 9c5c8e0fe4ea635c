"""`fedcir algorithms`: list, show and check algorithms."""

import json as jsonlib
import shutil
import textwrap
from dataclasses import asdict

from fedcir.cli.options import argument, flag
from fedcir.cli.output import print_table


def algorithms(
    name: str | None = argument("Algorithm to show in full.", None),
    check: bool = flag("--check", "Check that NAME keeps the guarantees of every algorithm."),
    json: bool = flag("--json", "Print as JSON."),
) -> None:
    """List the algorithms, or show the fields of one. NAME may be a file such as ./mine.py."""
    from fedcir.algorithms import find_algorithm, list_algorithms
    from fedcir.experiments.reference import describe_algorithm, measure_traffic

    if check:
        _check(name)
        return
    described = [describe_algorithm(find_algorithm(item)) for item in ([name] if name else list_algorithms())]
    traffic = measure_traffic(find_algorithm(name)()) if name else {}
    if json:
        print(jsonlib.dumps({**described[0], **traffic} if name else described, indent=1))
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


def _check(name: str | None) -> None:
    """Run the conformance checks and print a line for each."""
    from fedcir.algorithms import find_algorithm
    from fedcir.cli.progress import Meter
    from fedcir.conformance import CHECKS, Subject, find_fault
    from fedcir.errors import InputError

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
        print(jsonlib.dumps([asdict(setting) for setting in listed], indent=1))
        return
    width = min(100, shutil.get_terminal_size().columns)
    for setting in listed:
        default = f"; default {setting.default_text}{setting.made_for_text}" if setting.default_text else ""
        print(f"{setting.name}: {setting.takes}{default}{f'; {setting.option}' if setting.option else ''}")
        print(textwrap.fill(setting.meaning, width, initial_indent="    ", subsequent_indent="    "))
