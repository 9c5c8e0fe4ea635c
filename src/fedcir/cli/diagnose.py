"""`fedcir diagnose`: do clients differ, where, and did training close the gap?"""

import json as jsonlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcir.cli.options import Assignments, TrustCode, option
from fedcir.cli.tables import print_table

if TYPE_CHECKING:
    from fedcir.analysis.diagnose import Diagnosis

WIDE = 10
"""The most domains whose distances are printed as a matrix."""
LONG = 20
"""The most classes that are printed one by one."""


def diagnose(
    runs: Annotated[list[Path] | None, typer.Argument(help="One finished run, or two to compare.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset to measure before any training.")] = None,
    data_root: Annotated[Path | None, option("data_root")] = None,
    image_size: Annotated[int | None, option("image_size")] = None,
    model: Annotated[str | None, typer.Option(help="Network whose features are measured: cnn or resnet18.")] = None,
    clients: Annotated[int | None, option("clients")] = None,
    beta: Annotated[float | None, option("beta")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    samples: Annotated[int, typer.Option(help="Images per domain to measure distances on.")] = 1000,
    projection: Annotated[str, typer.Option(help="How to draw features in two dimensions: pca, tsne or umap.")] = "pca",
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write the picture to.")] = Path("diagnosis.png"),
    trust_code: TrustCode = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    set: Assignments = None,
) -> None:
    """Measure how far apart clients are, in data or in runs. Takes a dataset before any training, one run, or two."""
    from fedcir.cli.progress import Watch
    from fedcir.insight.diagnose import diagnose as find

    own = {"dataset": dataset, "image_size": image_size, "model": model, "clients": clients, "beta": beta, "seed": seed}
    with Watch(quiet) as watch:
        diagnosed = find(
            runs or (),
            data_root=data_root,
            samples=samples,
            projection=projection,
            out=out,
            set=set or (),
            trust_code=trust_code,
            on_work=watch.work,
            **own,
        )
    if json:
        print(jsonlib.dumps(diagnosed.to_rows(), indent=1, ensure_ascii=False))
        return
    for each in diagnosed.found:
        _print(each)
    for note in dict.fromkeys(note for each in diagnosed.found for note in each.told):
        print(f"note: {note}")
    for sentence in diagnosed.verdict:
        print(sentence)
    print(f"\nwrote the picture {out}")


def _print(found: "Diagnosis") -> None:
    names = found.domains
    matrix = names if len(names) <= WIDE and found.measured else []
    header = ["", *matrix, *(["mixture"] if found.measured else []), *([] if found.shared else ["label skew"])]
    rows = [header + (["accuracy", "risk"] if found.of_run else ["brightness", "contrast"])]
    accuracy, risk, skew = found.accuracy, found.risk, found.skew
    for name in names:
        row = [name]
        for other in matrix:
            pair = found.apart.pairs.get((name, other)) or found.apart.pairs.get((other, name))
            row.append("" if pair is None else f"{pair.value:.2f}")
        if found.measured:
            row.append(f"{found.apart.to_mixture[name]:.2f}")
        if not found.shared:
            row.append(f"{skew[name]:.2f}" if name in skew else "-")
        if found.pixels is None:
            row += [f"{accuracy[name].scaled(100):.1f}", f"{risk[name]:.2f}"]
        else:
            row += [f"{found.pixels[name].brightness:.2f}", f"{found.pixels[name].contrast:.2f}"]
        rows.append(row)
    told = "proxy A-distances between domains (0 to 2)" if found.measured else "domains"
    print_table(rows, f"{found.name}: {told}, with 95 % intervals")
    if found.measured and not matrix:
        pairs = sorted(found.apart.pairs.items(), key=lambda each: each[1].value)
        near, far = (f"{' and '.join(pair)} {each:.2f}" for pair, each in (pairs[0], pairs[-1]))
        print(f"{len(pairs)} pairs (--json lists them): the nearest are {near}, the furthest {far}")
    if found.aligned is not None:
        kls = ", ".join(f"{name} {each:,.0f}" for name, each in found.aligned.client_intervals.items())
        print(f"KL to q(z|y) in nats: {kls}")
    if found.of_run:
        if len(found.classes) <= LONG:
            _print_recall(found)
        _print_beside_accuracy(found)
        if mistaken := found.mistaken():
            print(f"most frequent mistakes: {', '.join(mistaken)}")
    print()


def _print_beside_accuracy(found: "Diagnosis") -> None:
    by_domain = {domain: found.beside_accuracy(domain) for domain in found.domains}
    rows = [["", *by_domain]]
    for name in next(iter(by_domain.values())):
        values = [each[name] for each in by_domain.values()]
        rows.append([name, *("-" if math.isnan(value) else f"{value:.3f}" for value in values)])
    print_table(rows, f"beside accuracy; {found.classes[1]} is positive" if len(rows) > 2 else "beside accuracy")


def _print_recall(found: "Diagnosis") -> None:
    rows = [["class", *found.domains]]
    for label, shares in zip(found.classes, found.recall, strict=True):
        rows.append([label, *("-" if math.isnan(share) else f"{share:.0%}" for share in shares)])
    print_table(rows, "share of each class that is classified correctly")
