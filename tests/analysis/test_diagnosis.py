"""What is said of data and of runs, and the numbers it rests on."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

from fedcir.analysis.diagnosis import Diagnosis, diagnose_data, diagnose_run, shift_config
from fedcir.analysis.divergence import Divergences, average_risk, compute_bound, measure_alignment
from fedcir.analysis.findings import change_of_accuracy, change_of_distance, verdict
from fedcir.config import Config, ModelConfig
from fedcir.data.federation import partition_dataset
from fedcir.errors import InputError
from fedcir.inference.evaluation import DomainPredictions
from fedcir.models.builder import make_image_builder
from fedcir.runs.reader import load_run
from fedcir.runs.statistics import RESAMPLES, Interval
from fedcir.runtime.simulation import train as train_own

Tiny = Callable[..., Config]
Train = Callable[..., Path]
Fedcir = Callable[..., Any]


def view(
    domain: str, labels: list[int], predicted: list[int], losses: list[float], classes: int = 2
) -> DomainPredictions:
    """Predictions of these classes, with these losses for the labels."""
    z = np.arange(2 * len(labels), dtype=np.float32).reshape(-1, 2)
    scores = np.full((len(labels), classes), -100.0)
    for row, (label, guess, loss) in enumerate(zip(labels, predicted, losses, strict=True)):
        scores[row, guess] = 1 - loss
        scores[row, label] = -loss
    return DomainPredictions(domain, np.array(labels), scores, z)


def apart(value: float) -> Divergences:
    distance = Interval(value, value - 0.1, value + 0.1)
    draws = np.linspace(value - 0.1, value + 0.1, RESAMPLES)
    return Divergences({("a", "b"): distance}, {"a": distance, "b": replace(distance, value=value / 2)}, draws, draws)


def found(value: float, name: str = "one") -> Diagnosis:
    views = [view("a", [0, 0, 1, 1], [0, 1, 1, 1], [1, 2, 3, 2]), view("b", [0, 1], [0, 1], [0.5, 1.5])]
    labels = {"a": np.array([2, 2]), "b": np.array([1, 1])}
    return Diagnosis(name, ("cat", "dog"), views, apart(value), labels, None, compute_bound(views, apart(value)))


def test_the_terms_of_the_bound_are_the_mean_risk_and_the_mean_distance_to_the_mixture() -> None:
    both = found(1.6).bound
    assert both is not None
    assert both.global_risk == pytest.approx((2.0 + 1.0) / 2)
    assert both.divergence == pytest.approx((1.6 + 0.8) / 2)


def test_confusion_counts_what_is_there_by_what_it_was_taken_for() -> None:
    assert found(1.0).confusion("a").tolist() == [[1, 1], [0, 2]]
    assert found(1.0).list_common_mistakes() == ["cat for dog in a (1 of 2)"]
    np.testing.assert_array_equal(found(1.0).recall, [[0.5, np.nan], [1.0, np.nan]])  # b has one image of each


def test_two_classes_have_an_auc_and_more_have_a_macro_f1() -> None:
    shares = np.array([0.9, 0.3, 0.4, 1.0])  # of dog: one of four pairs of a dog (the last two) and a cat is wrong
    with np.errstate(divide="ignore"):
        seen = DomainPredictions("a", np.array([0, 0, 1, 1]), np.log(np.stack([1 - shares, shares], axis=1)))
    two = replace(found(1.0), predictions=[seen])
    assert two.class_metrics("a") == {"AUC": 0.75, "F1": 0.5, "sensitivity": 0.5, "specificity": 0.5}
    three = replace(found(1.0), predictions=[view("a", [0, 0, 1, 1], [0, 1, 1, 1], [1, 2, 3, 2], classes=3)])
    assert three.class_metrics("a") == {"macro F1": pytest.approx((2 / 3 + 4 / 5) / 2)}


def test_every_accuracy_and_risk_has_its_interval() -> None:
    each = found(1.0)
    assert each.accuracy["a"].value == 0.75
    assert 0 <= each.accuracy["a"].low < 0.75 < each.accuracy["a"].high <= 1
    assert each.accuracy["b"] == Interval(1.0, 1.0, 1.0)
    assert each.mean_accuracy.value == pytest.approx((0.75 + 1) / 2)
    assert each.risk["b"] == Interval(1.0, 0.5, 1.5)
    assert each.bound is not None
    assert each.bound.global_risk_interval.low < 1.5 < each.bound.global_risk_interval.high


def test_label_skew_is_the_total_variation_to_the_mean() -> None:
    skewed = replace(found(1.0), labels={"a": np.array([9, 1]), "b": np.array([1, 9])})
    assert skewed.skew == pytest.approx({"a": 0.4, "b": 0.4})
    assert found(1.0).skew == {"a": 0.0, "b": 0.0}
    assert verdict(skewed)[1].startswith(
        "Label skew is large: to match the average of all 2 clients, a client would have to change 40% of"
    )
    assert not any("also differ in their labels" in sentence for sentence in verdict(skewed))
    views = [view("a", [0, 0, 0, 1], [0] * 4, [1] * 4), view("b", [0, 1, 1, 1], [0] * 4, [1] * 4)]
    assert "also differ in their labels, by up to 25%" in " ".join(verdict(replace(skewed, predictions=views)))


@pytest.mark.parametrize(("value", "word"), [(0.2, "small"), (0.9, "moderate"), (1.8, "large")])
def test_the_verdict_has_a_word_and_its_number(value: float, word: str) -> None:
    first = verdict(replace(found(value), is_shift=True))[0]
    assert first.startswith(f"Feature shift is {word}: ")
    assert f"{value:.2f}" in first


def run(name: str, distance: float, right: int, samples: int = 400) -> Diagnosis:
    """Two domains of so many images, of which the first `right` are right."""
    predicted = [1] * right + [0] * (samples - right)
    views = [view(name, [1] * samples, predicted, [1] * samples) for name in "ab"]
    return replace(found(distance, name), predictions=views)


@pytest.mark.parametrize(
    ("distance", "right", "words"),
    [
        (1.2, 300, "Alignment helped: domains are closer, and the model is more accurate."),
        (
            1.2,
            200,
            "Alignment worked, but accuracy did not follow: domains are closer, and accuracy changed within chance.",
        ),
        (1.2, 100, "Alignment worked, at the cost of accuracy: domains are closer, and the model is less accurate."),
        (
            1.8,
            300,
            "Accuracy rose, but not because of alignment: distances changed within chance, and the model is more",
        ),
        (1.8, 201, "There is no sign that alignment helped: both changes could be chance. "),
        (1.9, 200, "Alignment did not help: domains are further apart, and accuracy changed within chance."),
        (1.9, 100, "Alignment did not help: domains are further apart, and the model is less accurate."),
    ],
)
def test_whether_alignment_helped_rests_on_both_changes_and_on_chance(distance: float, right: int, words: str) -> None:
    assert verdict(run("fedavg", 1.8, 200), run("fedcir", distance, right))[-1].startswith(words)


def test_two_runs_are_paired_image_by_image() -> None:
    before, after = run("fedavg", 1.8, 200), run("fedcir", 1.2, 210)
    assert vars(change_of_distance(before, after)) == pytest.approx({"value": -0.6, "low": -0.6, "high": -0.6})
    gain = change_of_accuracy(before, after)
    assert gain.value == pytest.approx(10 / 400)
    # Ten of 400 images more are right at both, none less: sd of a domain's mean is sqrt(.025 * .975 / 400) = 0.0078.
    assert gain.high - gain.low == pytest.approx(2 * 1.96 * 0.0078 / math.sqrt(2), rel=0.15)
    message = verdict(before, after)
    assert message[-3] == (
        "From fedavg to fedcir, the mean distance between domains changed by -0.60 (-0.60 to -0.60), "
        "which is more than chance."
    )
    assert message[-2].startswith("Mean accuracy went from 50.0% to 52.5%: +2.5 (+1.")
    with pytest.raises(InputError, match="fedavg and fedcir were tested on different images"):
        verdict(before, run("fedcir", 1.2, 200, samples=300))


def test_alignment_is_the_kl_that_the_formula_gives() -> None:
    # One dimension, one class: KL(N(1, 1) || N(0, 2)) = log 2 + (1 + 1) / 8 - 1/2.
    views = [encoded(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))]
    gaussians = {"mean": torch.zeros(1, 1), "std": torch.full((1, 1), 2.0)}
    made = measure_alignment(views, gaussians)
    assert made is not None
    assert made.clients == {"a": pytest.approx(math.log(2) + 2 / 8 - 1 / 2)}
    # All mu and sigma are 1, so the true class Gaussian is that of every sample.
    assert made.generator == pytest.approx(made.clients["a"])
    assert measure_alignment([replace(views[0], sigma=None)], gaussians) is None
    assert made.mean == Interval(made.clients["a"], made.clients["a"], made.clients["a"])  # all samples are the same
    message = verdict(replace(found(1.0), alignment=made))[-1]
    assert (
        "some way from the generator's q(z|y): the mean KL divergence is 0 (0 to 0) nats, 0.44 per dimension of z"
        in message
    )


def test_the_true_class_gaussian_has_the_variance_of_mu_and_the_mean_of_sigma_squared() -> None:
    # Var[mu] = 1 and E[sigma^2] = (0.25 + 2.25) / 2 = 1.25: z has the variance 2.25, which is the generator's.
    mu, sigma = np.array([[-1], [1]], np.float32), np.array([[0.5], [1.5]], np.float32)
    gaussians = {"mean": torch.zeros(1, 1), "std": torch.full((1, 1), 1.5)}
    made = measure_alignment([encoded(mu, sigma)], gaussians)
    assert made is not None
    assert made.generator == pytest.approx(0, abs=1e-12)


def test_the_bound_says_that_the_global_models_risk_stands_in_for_that_of_local_models() -> None:
    message = next(sentence for sentence in verdict(found(1.0)) if "bound" in sentence)
    assert message.startswith("The average risk of the global model is 1.500 (")
    assert "replaces the first term of the paper's bound, the average risk of the local models" in message


def test_the_generators_match_has_the_spread_of_resampled_classes() -> None:
    # KL(N(m, s) || N(0, 1)) with m = 3 and s = 1 is 4.5; its sd is sqrt((m s)^2 / n) = 0.15 for 400 samples.
    z = np.random.default_rng(0).normal(3, 1, (400, 1)).astype(np.float32)
    made = measure_alignment(
        [encoded(z, np.full_like(z, 1e-3))],
        {"mean": torch.zeros(1, 1), "std": torch.ones(1, 1)},
    )
    assert made is not None
    assert made.generator_interval is not None
    assert made.generator_interval.value == pytest.approx(4.5, abs=0.4)
    assert made.generator_interval.high - made.generator_interval.low == pytest.approx(2 * 1.96 * 0.15, rel=0.2)


def encoded(z: Any, sigma: Any) -> DomainPredictions:
    """Images of one class with these representations."""
    return DomainPredictions("a", np.zeros(len(z), np.int64), np.zeros((len(z), 1)), z, sigma)


def test_a_run_seen_again_is_as_accurate_as_its_last_round_says(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    run = load_run(train(tiny("fedcir"), tmp_path / "run"))
    last = run.records[-1]
    again = {item.domain: item for item in diagnose_run(run).predictions}
    assert {name: item.accuracy for name, item in again.items()} == last.accuracy
    assert last.risk is not None
    assert {name: item.losses.mean() for name, item in again.items()} == pytest.approx(last.risk, rel=1e-5)
    risks = average_risk(run.records)
    assert list(risks) == [1, 2, 3]
    assert risks[3] == pytest.approx(np.mean(list(last.risk.values())))
    assert diagnose_run(run).alignment is not None


def test_distances_are_of_a_sample_and_all_else_of_every_test_image(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    run = load_run(train(tiny("fedcir"), tmp_path / "run"))
    some = diagnose_run(run, limit=8)
    assert {view.domain: len(view.labels) for view in some.sample} == {"ink": 8, "pen": 8, "wax": 8}
    assert {view.domain: view.accuracy for view in some.predictions} == run.records[-1].accuracy
    assert some.bound is not None
    assert some.bound.global_risk == pytest.approx(run.records[-1].risk_mean, rel=1e-5)


def test_a_domain_that_nobody_trains_on_is_in_no_mean(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    run = load_run(train(tiny("fedavg", "partition.hold_out=pen"), tmp_path / "run"))
    made, last = diagnose_run(run), run.records[-1]
    assert made.unseen == ("pen",)
    assert made.mean_accuracy.value == pytest.approx(last.accuracy_mean)
    assert made.bound is not None
    assert made.bound.global_risk == pytest.approx(last.risk_mean, rel=1e-5)


def test_data_are_told_by_their_pixels(tiny: Tiny) -> None:
    made = diagnose_data(tiny())
    assert made.pixels is not None
    assert all(0 < pixel.brightness < 1 for pixel in made.pixels.values())
    assert made.bound is None
    assert (made.encoder, made.shared, list(made.labels)) == ("an untrained cnn", False, ["ink", "pen", "wax"])
    assert made.labels["pen"].tolist() == [8, 8, 8]


def test_label_skew_is_that_of_the_clients_training_images(tiny: Tiny) -> None:
    config = tiny("fedcir", "partition.scheme=dirichlet", "partition.clients=6", "partition.beta=0.1")
    made = diagnose_data(config)
    domains, shares = partition_dataset(config)
    assert list(made.labels) == ["0", "1", "2", "3", "4", "5"]
    for share, counts in zip(shares, made.labels.values(), strict=True):
        labels = domains[share.domain].train.labels[share.rows[share.domain]]
        np.testing.assert_array_equal(counts, np.bincount(labels, minlength=3))
    assert made.shared
    assert made.notes[0].startswith("6 clients share the training images of 3 domains: label skew is that of these")
    most = max(made.skew, key=lambda name: made.skew[name])
    assert f"({most} of" not in verdict(made)[1]
    assert f"The most skewed is client {most} of {made.client_domains[most]}, " in verdict(made)[1]


def test_a_domain_that_nobody_trains_on_has_no_label_skew(tiny: Tiny) -> None:
    made = diagnose_data(tiny("fedcir", "partition.hold_out=pen"))
    assert list(made.skew) == ["ink", "wax"]
    one = replace(made, labels={"ink": made.labels["ink"]})
    assert verdict(one)[1] == "There is no label skew: ink is the only client that trains."
    assert made.domains == ["ink", "wax"]  # distances are between sites that train


def test_feature_shift_is_one_measure_whatever_is_trained(tiny: Tiny) -> None:
    plain = diagnose_data(replace(tiny(), model=ModelConfig()))
    other = diagnose_data(shift_config(tiny("fedavg", "model.name=resnet18", "data.val_fraction=0.3", "local.lr=1")))
    assert plain.is_shift
    assert other.divergences.pairs == plain.divergences.pairs
    assert other.skew == plain.skew
    assert verdict(other) == verdict(plain)
    assert verdict(plain)[0].startswith("Feature shift is ")
    assert (
        diagnose_data(tiny()).divergences.pairs != plain.divergences.pairs
    )  # a cnn of width 2 is another representation


def test_only_the_shared_measure_is_called_feature_shift(tiny: Tiny) -> None:
    assert verdict(found(1.6, "mine"))[0].startswith(
        "The distance of representations is large: under the model of mine, the mean proxy A-distance "
    )
    assert verdict(diagnose_data(tiny()))[0].startswith("The distance of representations is ")


def test_feature_shift_does_not_look_at_test_images(tiny: Tiny, data_root: Path, tmp_path: Path) -> None:
    for path in data_root.iterdir():
        arrays = dict(np.load(path))
        np.savez(tmp_path / path.name, **{**arrays, "x_test": np.zeros_like(arrays["x_test"])})
    config = replace(tiny(), model=ModelConfig())
    elsewhere = replace(config, data=replace(config.data, root=str(tmp_path)))
    assert verdict(diagnose_data(elsewhere)) == verdict(diagnose_data(config))


def test_a_given_encoder_is_named(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    encoder = make_image_builder(config.model, 3, 3, seed=5).encoder()
    save_file(encoder.state_dict(), tmp_path / "mine.safetensors")
    made = diagnose_data(tiny("fedcir", f"model.weights={tmp_path / 'mine.safetensors'}"))
    assert f"under the encoder of {tmp_path / 'mine.safetensors'}, the mean" in verdict(made)[0]
    assert not np.array_equal(made.predictions[0].z, diagnose_data(config).predictions[0].z)


def test_diagnose_of_data_of_a_run_and_of_two(
    fedcir: Fedcir, options: list[str], data_root: Path, tmp_path: Path
) -> None:
    data = ["--dataset", "arrays", "--data-root", data_root]
    output = fedcir("diagnose", *data, "-o", tmp_path / "data.svg", "--samples", 12, "--clients", 6, "--beta", 0.1)
    assert output.code == 0, output.err
    assert "under an untrained encoder" in output.out
    assert "note: 6 clients share the training images of 3 domains" in output.out
    assert b"<svg" in (tmp_path / "data.svg").read_bytes()
    for name in ("fedavg", "fedcir"):
        fedcir("run", *options, "--algorithm", name, "--out", tmp_path / name)
    output = fedcir("diagnose", tmp_path / "fedavg", tmp_path / "fedcir", "-o", tmp_path / "two.png")
    assert output.code == 0, output.err
    assert "From fedavg to fedcir, the mean distance between domains changed by " in output.out
    assert "KL to q(z|y) in nats: ink" in output.out
    assert output.out.count("share of each class that is classified correctly") == 2
    assert output.out.count("macro F1") == 2
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    output = fedcir("diagnose", tmp_path / "fedavg", "--json", "-o", tmp_path / "one.png")
    (message,) = json.loads(output.out)
    assert set(message["pad"]["to_mixture"]) == set(message["accuracy"])
    assert message["accuracy_intervals"]["ink"]["value"] == message["accuracy"]["ink"]
    assert np.sum(message["confusion"]["ink"], axis=1).tolist() == [4, 4, 4]
    assert 0 <= message["beside_accuracy"]["ink"]["macro F1"] <= 1
    assert np.trace(message["confusion"]["ink"]) / 12 == pytest.approx(message["accuracy"]["ink"])
    assert message["bound"]["global_risk_interval"]["value"] == message["bound"]["global_risk"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.svg", "fedavg", "fedcir", "one.png", "two.png"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere holds no run"),
        (["--samples", "3"], "samples must be at least 8, got 3"),
        (["--projection", "som", "--samples", "12"], "projection must be one of pca, tsne, umap, got 'som'"),
        (["x", "--dataset", "pacs", "--beta", "1"], "leave beta and dataset out"),
        (["-o", "picture.docx"], "the name of the file must end in .png, .svg, .pdf, got 'picture.docx'"),
        (["-o", "no/picture.png"], "no/picture.png: there is no folder no"),
    ],
)
def test_bad_input_is_one_line(
    fedcir: Fedcir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(fedcir("diagnose", *arguments), words)
    assert not list(tmp_path.iterdir())


def refused(message: Any, words: str) -> None:
    assert (message.code, message.out, message.err.count("\n")) == (2, "", 1), message
    assert words in message.err


def test_data_that_are_too_few_are_refused_and_named(fedcir: Fedcir, write_domain: Any, tmp_path: Path) -> None:
    out, data = ["-o", tmp_path / "x.png"], ["--dataset", "arrays", "--data-root"]
    (tmp_path / "one").mkdir()
    write_domain(tmp_path / "one" / "ink.npz")
    refused(
        fedcir("diagnose", *data, tmp_path / "one", *out), "arrays has only one domain, 'ink': a distance needs two"
    )
    write_domain(tmp_path / "one" / "pen.npz", train=6, seed=1)
    refused(
        fedcir("diagnose", *data, tmp_path / "one", *out),
        "domain 'pen' has 6 training images, but a diagnosis needs at least 8",
    )
    assert not (tmp_path / "x.png").exists()


def test_of_a_class_with_one_test_image_in_a_domain_nothing_is_said(
    fedcir: Fedcir, options: list[str], write_domain: Any, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    write_domain(root / "ink.npz")
    arrays = dict(np.load(write_domain(root / "pen.npz", test=12)))
    few = np.r_[np.flatnonzero(arrays["y_test"] != 2), 2]
    np.savez(root / "pen.npz", **{**arrays, "x_test": arrays["x_test"][few], "y_test": arrays["y_test"][few]})
    fedcir("run", *options, "--data-root", root, "--out", tmp_path / "run")
    output = fedcir("diagnose", tmp_path / "run", "-o", tmp_path / "x.png")
    assert output.code == 0, output.err
    assert "note: at most one test image of 2 in pen: left out of the results by class" in output.out
    assert re.search(r"^ *2 +\d+% +- *$", output.out, re.MULTILINE)
    assert not re.search(r"2 for \d in pen", output.out)


def test_runs_that_cannot_be_seen_again_are_refused(
    fedcir: Fedcir, options: list[str], write_domain: Any, tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    out = ["-o", tmp_path / "x.png"]
    fedcir("run", *options, "--out", tmp_path / "one")
    fedcir("run", *options, "--seed", 1, "--clients", 6, "--out", tmp_path / "other")
    refused(fedcir("diagnose", tmp_path / "one", tmp_path / "other", *out), "ran with different clients or seeds")
    refused(fedcir("diagnose", *[tmp_path / "one"] * 3, *out), "diagnose takes one run or two, got 3")
    (tmp_path / "other" / "model.safetensors").write_bytes(b"damaged")
    refused(fedcir("diagnose", tmp_path / "other", *out), "cannot read")
    (tmp_path / "other" / "model.safetensors").unlink()
    refused(
        fedcir("diagnose", tmp_path / "other", *out),
        "other/model.safetensors: No such file or directory; resume the run",
    )
    wide = train(tiny("fedcir", "model.width=3", "server.rounds=1"), tmp_path / "wide")
    shutil.copy(wide / "model.safetensors", tmp_path / "other")
    refused(fedcir("diagnose", tmp_path / "other", *out), "other/model.safetensors: its checksum is ")
    train(tiny(), tmp_path / "half", until=1)
    refused(fedcir("diagnose", tmp_path / "half", *out), "holds no finished run")

    root = tmp_path / "data"
    root.mkdir()
    for number, name in enumerate(("ink", "pen")):
        write_domain(root / f"{name}.npz", seed=number)
    fedcir("run", *options, "--data-root", root, "--out", tmp_path / "moved")
    root.rename(tmp_path / "elsewhere")
    refused(
        fedcir("diagnose", tmp_path / "moved", *out),
        f"ran on {root}, which is no longer a folder: give its new place as data_root (--data-root)",
    )
    assert fedcir("diagnose", tmp_path / "moved", "--data-root", tmp_path / "elsewhere", *out).code == 0
    (tmp_path / "x.png").unlink()
    write_domain(tmp_path / "elsewhere" / "pen.npz", seed=7)
    output = fedcir("diagnose", tmp_path / "moved", "--data-root", tmp_path / "elsewhere", *out)
    refused(output, f"the data at {tmp_path / 'elsewhere'} are not those that {tmp_path / 'moved'} ran on")
    assert not (tmp_path / "x.png").exists()


def test_a_run_on_datasets_of_ones_own_has_nothing_to_open(fedcir: Fedcir, tmp_path: Path) -> None:
    labels = torch.arange(12) % 3
    sites = [(TensorDataset(torch.randn(12, 4), labels),) * 2 for _ in range(2)]
    train_own(
        sites, encoder=torch.nn.Identity(), num_classes=3, rounds=1, local_steps=1, workers=1, out=tmp_path / "own"
    )
    refused(
        fedcir("diagnose", tmp_path / "own", "-o", tmp_path / "x.png"), "is a run of fedcir.train on your own Datasets"
    )


def test_a_deployments_run_is_known_by_its_number_of_test_images(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    run = load_run(train(tiny("fedavg"), tmp_path / "run"))
    entries = [{"id": i, "domain": name, "train": 24, "test": 12} for i, name in enumerate(("ink", "pen", "wax"))]
    assert len(diagnose_run(replace(run, manifest={"clients": entries, "hash": "", "key": ""})).predictions) == 3
    entries[1]["test"] = 11
    with pytest.raises(InputError, match=r"are not those that .* ran on"):
        diagnose_run(replace(run, manifest={"clients": entries, "hash": "", "key": ""}))
