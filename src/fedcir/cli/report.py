"""`fedcir report`, `evaluate`, `audit`, `worth`, `forget`, `diagnose`: results of finished runs, and of datasets."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcir.cli import options as cli
from fedcir.cli.application import name_options, print_json, print_note, print_table
from fedcir.cli.options import argument, flag, option, output, take_options
from fedcir.errors import InputError

if TYPE_CHECKING:
    from fedcir.analysis.diagnosis import Diagnosis

WIDE = 10
"""The most domains whose distances are printed as a matrix."""
LONG = 20
"""The most classes that are printed one by one."""


def report(
    runs: list[Path] = argument("Finished runs, or folders of runs."),
    out: Path = output("File to write the page to.", Path("report.html")),
    target: float | None = cli.TARGET,
    samples: int = option("Test images per domain to measure distances on; 0 skips them.", 250),
    data_root: Path | None = option("Folder that holds the dataset, if it has moved."),
    trust_code: bool = cli.TRUST_CODE,
    quiet: bool = cli.ONLY_ERRORS,
) -> None:
    """Write one page about finished runs. Has accuracies, curves, distances, costs and settings; opens offline."""
    from fedcir.cli.progress import Watch
    from fedcir.reporting.run_report import report as write_report

    with Watch(quiet) as watch:
        keywords: dict[str, Any] = {"target": target, "samples": samples, "data_root": data_root}
        page = write_report(runs, out=out, trust_code=trust_code, on_work=watch.work, **keywords)
    for note in page.notes:
        print_note(name_options(note))
    if not quiet:
        print(f"wrote {page.path}: open it in a browser")


def evaluate(
    run: Path = cli.RUN,
    dataset: str | None = option("Dataset to test on. [default: the run's own]"),
    data_root: Path | None = option("Folder that holds it."),
    split: str = option("test, val, train, or all images; test and all leave out what the run has seen.", "test"),
    adapt: bool = flag("--adapt", "First take each domain's statistics from its images, without labels."),
    force: bool = cli.FORCE_SITE,
    site: str | None = cli.SITE,
    device: str = cli.DEVICE,
    out: Path | None = output("Folder for the page and the numbers. [default: RUN/evaluation]"),
    quiet: bool = cli.QUIET,
    json: bool = cli.JSON_NUMBERS,
    algorithm: str | None = cli.OWN_ALGORITHM,
    trust_code: bool = cli.TRUST_CODE,
    set: list[str] | None = cli.SET,
) -> None:
    """Test the model of a run on labelled data. Shows accuracy and mistakes, or the task's scores; writes a page."""
    from fedcir.cli.progress import Watch
    from fedcir.inference.evaluation import Evaluation
    from fedcir.reporting import evaluation_report
    from fedcir.reporting.score_report import build_name_rows

    with Watch(quiet) as watch:
        keywords: dict[str, Any] = {"dataset": dataset, "data_root": data_root, "split": split, "set": set or ()}
        keywords |= {
            "adapt": adapt,
            "force": force,
            "site": site,
            "device": device,
            "algorithm": algorithm,
            "trust_code": trust_code,
        }
        result = evaluation_report.evaluate(run, out=out or run / "evaluation", on_work=watch.work, **keywords)
    if not quiet:
        for note in result.notes:
            print_note(note)
    if json:
        print_json(result.to_json())
    elif not quiet:
        what = "accuracy in per cent" if isinstance(result, Evaluation) else result.task.name
        print_table(
            evaluation_report.build_domain_rows(result), f"{result.name} on {result.dataset} ({result.split}), {what}"
        )
        if not isinstance(result, Evaluation) and (rows := build_name_rows(result)):
            print_table(rows, f"{result.task.primary.label} by name")
        for sentence in evaluation_report.describe_evaluation(result):
            print(sentence)
        print(f"\nwrote {result.page} and {result.numbers}")


def audit(
    run: Path = cli.RUN,
    data_root: Path | None = option("Folder of the run's data, if it has moved."),
    samples: int = option("Training images per domain to test for membership.", 1000),
    images: int = option("Images of the batch to reconstruct.", 1),
    steps: int = option("Steps of the reconstruction; 0 leaves it out.", 300),
    out: Path | None = output("Folder for page, picture and numbers. [default: RUN/audit]"),
    quiet: bool = cli.QUIET,
    json: bool = cli.JSON_NUMBERS,
    trust_code: bool = cli.TRUST_CODE,
) -> None:
    """Attack a run to see what it reveals. Tests for membership, reconstructs an image, lists what left clients."""
    from fedcir.cli.progress import Watch
    from fedcir.reporting import leakage_report

    with Watch(quiet) as watch:
        keywords: dict[str, Any] = {"samples": samples, "images": images, "steps": steps, "data_root": data_root}
        keywords |= {"out": out or run / "audit", "trust_code": trust_code}
        result = leakage_report.audit(run, on_work=watch.work, **keywords)
    if json:
        print_json(result.to_json())
    elif not quiet:
        title = f"{result.name}: telling training images from test images by their loss"
        print_table(leakage_report.build_membership_rows(result), title)
        if result.inverted:
            print_table(
                leakage_report.build_inversion_rows(result), "images reconstructed from the gradient of one step"
            )
        if result.sums:
            print_table(leakage_report.build_sum_rows(result), "attacks on the sums that clients sent")
        if result.sent:
            print_table(leakage_report.build_upload_rows(result), "what left each client")
        for sentence in leakage_report.describe_audit(result):
            print(sentence)
        print("\nWhat this does not prove:")
        for limit in leakage_report.LIMITS:
            print(f"- {limit}")
        print(f"\nwrote {', '.join(str(path) for path in (result.page, result.picture, result.numbers) if path)}")


def forget(
    run: Path = cli.RUN,
    site: str = argument("Domain to leave out, or the name or number of a client."),
    out: Path = output("Folder for the run without it.", ...),
    key: Path | None = option(
        "File of an Ed25519 key that signs the record; made if missing. [default: RUN/forget.key]"
    ),
    data_root: Path | None = option("Folder of the run's data, if it has moved."),
    quiet: bool = cli.QUIET,
    json: bool = cli.JSON,
    trust_code: bool = cli.TRUST_CODE,
) -> None:
    """Make the run that a site never joined, equal to the byte. Writes a signed record of what was removed."""
    from fedcir.analysis.withdrawal import forget as forget_site
    from fedcir.cli.progress import Watch

    with Watch(quiet) as watch:
        keywords: dict[str, Any] = {"key": key, "data_root": data_root, "trust_code": trust_code}
        result = forget_site(run, site, out=out, on_work=watch.work, **keywords)
    record = result.record
    if json:
        print_json(record)
    elif not quiet:
        rounds = record["rounds"]
        print(
            f"removed {site}: {record['images']:,} training images; rounds {rounds['repeated_from']} to "
            f"{rounds['total']} were run again without them"
        )
        if result.before is not None and result.after is not None:
            rows = [["model", "AUC (95 %)", "advantage (95 %)"]]
            for name, membership in (("before", result.before), ("after", result.after)):
                rows.append([name, f"{membership.auc:.2f}", f"{membership.advantage:.2f}"])
            print_table(rows, f"telling the training images of {site} from test images by their loss")
        print(f"wrote {result.path} and {result.file}, signed by {result.key}")


def worth(
    run: Path = argument("A finished run of fedcirone."),
    replies: list[Path] | None = argument("Replies of the sites, for a run that was merged from files.", None),
    data_root: Path | None = option("Folder of the run's data, if it has moved."),
    site_images: Path | None = option("At a site of a merged run: its images. Writes its reply to --out."),
    site: str | None = option("With --site-images: the site's name. [default: that of the folder]"),
    key: Path | None = option("With --site-images: the site's key. [default: as --out, with .key]"),
    out: Path | None = output("Folder for the page and the numbers, or a site's reply. [default: RUN/worth]"),
    quiet: bool = cli.QUIET,
    json: bool = cli.JSON_NUMBERS,
    trust_code: bool = cli.TRUST_CODE,
) -> None:
    """Measure whether federating is worth it, and for whom. Compares each site alone, the others, and all together."""
    from fedcir.cli.progress import Watch

    if site_images is not None:
        _reply_to_heads(run, site_images, site, key, out, trust_code)
        return
    from fedcir.reporting import worth_report

    with Watch(quiet) as watch:
        keywords: dict[str, Any] = {"data_root": data_root, "out": out or run / "worth", "trust_code": trust_code}
        keywords |= {"replies": replies or ()}
        result = worth_report.worth(run, on_work=watch.work, **keywords)
    if not quiet:
        for note in result.notes:
            print_note(note)
    if json:
        print_json(result.to_json())
    elif not quiet:
        title = f"{result.name} on {result.dataset}, accuracy on each site's test images in per cent"
        print_table(worth_report.build_worth_rows(result), title)
        for sentence in worth_report.describe_worth(result):
            print(sentence)
        print(f"\nwrote {result.page} and {result.numbers}")


def _reply_to_heads(
    run: Path, images: Path, site: str | None, key: Path | None, out: Path | None, trust_code: bool
) -> None:
    from fedcir.analysis.courier_heads import make_head_reply
    from fedcir.runs.reader import load_run

    if out is None:
        raise InputError("name the file of the reply with --out, such as hospital-a.hits")
    count = make_head_reply(load_run(run, trust_code=trust_code), images, out, site=site, key=key)
    print(f"tested the heads of all coalitions on {count:,} images; wrote {out}, a bit for each head and image")


@take_options("data_root", "image_size", "clients", "beta", "seed")
def diagnose(
    runs: list[Path] | None = argument("One finished run, or two to compare.", None),
    dataset: str | None = option("Dataset to measure before any training."),
    settings: Any = None,
    model: str | None = option("Network whose features are measured: cnn or resnet18."),
    samples: int = option("Images per domain to measure distances on.", 1000),
    projection: str = option("How to draw features in two dimensions: pca, tsne or umap.", "pca"),
    out: Path = output("File to write the picture to.", Path("diagnosis.png")),
    trust_code: bool = cli.TRUST_CODE,
    quiet: bool = cli.NO_PROGRESS,
    json: bool = cli.JSON_NUMBERS,
    set: list[str] | None = cli.SET,
) -> None:
    """Measure how far apart clients are, in data or in runs. Takes a dataset before any training, one run, or two."""
    from fedcir.cli.progress import Watch
    from fedcir.reporting import diagnosis_report

    with Watch(quiet) as watch:
        settings |= {"dataset": dataset, "model": model, "set": set or (), "samples": samples, "projection": projection}
        result = diagnosis_report.diagnose(runs or (), out=out, trust_code=trust_code, on_work=watch.work, **settings)
    if json:
        print_json(result.to_rows())
        return
    for diagnosis in result.diagnoses:
        _print_diagnosis(diagnosis)
    for note in dict.fromkeys(note for diagnosis in result.diagnoses for note in diagnosis.all_notes):
        print(f"note: {note}")
    for sentence in result.verdict:
        print(sentence)
    print(f"\nwrote the picture {out}")


def _print_diagnosis(diagnosis: "Diagnosis") -> None:
    names = diagnosis.domains
    matrix = names if len(names) <= WIDE and diagnosis.measured else []
    has_skew = not diagnosis.shared and bool(diagnosis.labels)
    header = ["", *matrix, *(["mixture"] if diagnosis.measured else []), *(["label skew"] if has_skew else [])]
    rows = [
        header + (["accuracy", "risk"] if diagnosis.is_run else ["brightness", "contrast"] if diagnosis.pixels else [])
    ]
    accuracy, risk, skew = diagnosis.accuracy, diagnosis.risk, diagnosis.skew
    for name in names:
        row = [name]
        for other in matrix:
            pair = diagnosis.divergences.between(name, other)
            row.append("" if pair is None else f"{pair.value:.2f}")
        if diagnosis.measured:
            row.append(f"{diagnosis.divergences.to_mixture[name]:.2f}")
        if has_skew:
            row.append(f"{skew[name]:.2f}" if name in skew else "-")
        if diagnosis.pixels is None:
            row += [f"{accuracy[name].scaled(100):.1f}", f"{risk[name]:.2f}"]
        elif diagnosis.pixels:
            row += [f"{diagnosis.pixels[name].brightness:.2f}", f"{diagnosis.pixels[name].contrast:.2f}"]
        rows.append(row)
    title = "proxy A-distances between domains (0 to 2)" if diagnosis.measured else "domains"
    print_table(rows, f"{diagnosis.name}: {title}, with 95 % intervals")
    if diagnosis.measured and not matrix:
        pairs = sorted(diagnosis.divergences.pairs.items(), key=lambda item: item[1].value)
        nearest, furthest = (f"{' and '.join(pair)} {distance:.2f}" for pair, distance in (pairs[0], pairs[-1]))
        print(f"{len(pairs)} pairs (--json lists them): the nearest are {nearest}, the furthest {furthest}")
    if diagnosis.alignment is not None:
        kls = ", ".join(f"{name} {kl:,.0f}" for name, kl in diagnosis.alignment.client_intervals.items())
        print(f"KL to q(z|y) in nats: {kls}")
    if diagnosis.is_run:
        _print_classes(diagnosis)
        if mistakes := diagnosis.list_common_mistakes():
            print(f"most frequent mistakes: {', '.join(mistakes)}")
    print()


def _print_classes(diagnosis: "Diagnosis") -> None:
    if len(diagnosis.classes) <= LONG:
        rows = [["class", *diagnosis.domains]]
        for label, shares in zip(diagnosis.classes, diagnosis.recall, strict=True):
            rows.append([label, *("-" if math.isnan(share) else f"{share:.0%}" for share in shares)])
        print_table(rows, "share of each class that is classified correctly")
    by_domain = {domain: diagnosis.class_metrics(domain) for domain in diagnosis.domains}
    rows = [["", *by_domain]]
    for metric in next(iter(by_domain.values())):
        values = [metrics[metric] for metrics in by_domain.values()]
        rows.append([metric, *("-" if math.isnan(value) else f"{value:.3f}" for value in values)])
    positive = f"; {diagnosis.classes[1]} is positive" if len(rows) > 2 else ""
    print_table(rows, f"other metrics{positive}")
