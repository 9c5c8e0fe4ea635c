"""What clients tell of the images that they set aside, and what becomes of it."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcir.algorithms.fedavg import FedAvg
from fedcir.algorithms.fedcir import FedCiR
from fedcir.client.calibration import (
    BETAS,
    BINS,
    CONFIDENCE_BINS,
    PREFIX,
    Calibration,
    calibration_sums,
    compute_confidence,
    find_threshold,
    find_zero,
    loss_slopes,
)
from fedcir.client.client_requests import load_for_evaluation, predict_batches
from fedcir.client.prediction import predict
from fedcir.config import Config
from fedcir.data.federation import open_federation
from fedcir.errors import InputError
from fedcir.models.builder import NetworkBuilder
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.session import open_session
from fedcir.tasks.classification import to_task
from fedcir.types import LocalContext

Tiny = Callable[..., Config]
Train = Callable[..., Path]
ASIDE = "data.val_fraction=0.25"


def logits_of(seed: int, sharper: float, samples: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are `sharper` times what they should be: labels are drawn from the true probabilities."""
    rng = torch.Generator().manual_seed(seed)
    true = torch.randn(samples, 4, generator=rng) * 2
    labels = torch.multinomial(true.softmax(-1), 1, generator=rng)[:, 0]
    return true * sharper, labels


def test_the_slope_is_the_derivative_of_the_log_loss() -> None:
    logits, labels = logits_of(0, 1.0, 20)
    for beta, slope in zip(BETAS, loss_slopes(logits, labels), strict=True):
        at = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
        F.cross_entropy(at * logits.double(), labels, reduction="sum").backward()
        assert float(slope) == pytest.approx(float(at.grad), rel=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("sharper", [0.5, 1.0, 4.0])
def test_the_temperature_undoes_what_makes_logits_too_sharp_and_lowers_the_loss_on_other_images(sharper: float) -> None:
    logits, labels = logits_of(0, sharper, 4000)
    temperature = 1 / find_zero(loss_slopes(logits, labels).numpy())
    assert temperature == pytest.approx(sharper, rel=0.1)
    other, right = logits_of(1, sharper)
    if sharper != 1.0:
        assert F.cross_entropy(other / temperature, right) < F.cross_entropy(other, right)


def test_the_temperature_is_near_the_best_of_all() -> None:
    logits, labels = logits_of(0, 3.0)
    result = 1 / find_zero(loss_slopes(logits, labels).numpy())
    tried = np.geomspace(1, 9, 2000)
    losses = [float(F.cross_entropy(logits / item, labels)) for item in tried]
    assert result == pytest.approx(tried[int(np.argmin(losses))], rel=0.01)


def test_where_every_image_is_right_or_wrong_the_temperature_stays_in_range() -> None:
    logits = torch.eye(3) * 5
    assert find_zero(loss_slopes(logits, torch.arange(3)).numpy()) == pytest.approx(BETAS[-1])
    assert find_zero(loss_slopes(logits, torch.tensor([1, 2, 0])).numpy()) == pytest.approx(BETAS[0])


def test_a_model_that_is_right_about_few_images_is_not_certain() -> None:
    """Of smoothed labels with a share s, the best probability is 1 - s * 2/3: here 1 - 1/5 * 2/3."""
    logits = torch.eye(3) * 5
    result = Calibration.of([sums_of(logits, torch.arange(3))], 1)
    assert result is not None
    assert float((logits / result.temperature).softmax(-1).max()) == pytest.approx(1 - 2 / 15, abs=2e-3)


def sums_of(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    return calibration_sums([(logits, torch.zeros(len(labels)), labels)])


@pytest.mark.parametrize("sites", [2, 7, 50, 100, 500])
def test_the_temperature_does_not_depend_on_which_site_holds_which_image(sites: int) -> None:
    logits, labels = logits_of(0, 2.0, 500)
    whole = Calibration.of([sums_of(logits, labels)], 1)
    owner = torch.randint(sites, (500,), generator=torch.Generator().manual_seed(1))
    parts = [sums_of(logits[owner == site], labels[owner == site]) for site in range(sites)]
    split = Calibration.of(parts, 1)
    assert whole is not None
    assert split is not None
    assert split.images == whole.images == 500
    assert split.temperature == pytest.approx(whole.temperature, rel=1e-6)


@pytest.mark.parametrize("images", [5, 500])
def test_the_temperature_is_that_of_a_direct_fit_on_labels_smoothed_over_all_images(images: int) -> None:
    logits, labels = logits_of(0, 2.0, images)
    result = Calibration.of([sums_of(logits, labels)], 1)
    values, share = logits.double().numpy(), 1 / (images + 2)
    targets = (1 - share) * np.eye(4)[labels.numpy()] + share / 4
    tried = np.geomspace(0.2, 15, 4000)
    scaled = values[None] / tried[:, None, None]
    losses = (np.log(np.exp(scaled).sum(-1)) - (targets * scaled).sum(-1)).sum(-1)
    assert result is not None
    assert result.temperature == pytest.approx(tried[int(losses.argmin())], rel=0.01)


def test_a_share_is_that_of_images_that_score_lower_and_never_saturates() -> None:
    counts = [0] * BINS
    counts[10], counts[20] = 3, 6
    known = Calibration(1.0, tuple(counts))
    scores = torch.tensor([0.0, 0.21, 0.3, 0.41, 0.5, 0.9, 0.91, 1.0])
    shares = known.share(scores)
    assert shares.diff().min() > 0
    assert shares[2] == pytest.approx(0.3, abs=0.04)  # 3 of 9, and an image that is everywhere
    assert shares[4] == pytest.approx(0.95, abs=0.01)
    assert shares[-1] == pytest.approx(1.0)


def test_without_images_a_share_is_the_score_and_the_temperature_1() -> None:
    scores = torch.linspace(0, 1, 7, dtype=torch.float64)
    assert np.allclose(Calibration().share(scores), scores)
    assert Calibration().temperature == 1.0


def test_an_image_is_novelty_where_its_features_point_away_from_every_class() -> None:
    builder = NetworkBuilder(to_task(2), 2, 2, 0, torch.nn.Identity)
    x = torch.tensor([[5.0, 0.0], [1.0, 1.0], [-1.0, -1.0]])
    for method in (FedAvg(), FedCiR()):
        modules = method.build(builder)
        with torch.no_grad():
            modules["model"].head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))  # type: ignore[union-attr]
        output = predict(method, modules, x, LocalContext(1, 1, 2, 3, {}, torch.Generator()))
        expected = [0.0, (1 - math.sqrt(0.5)) / 2, (1 + math.sqrt(0.5)) / 2]
        assert output.novelty.tolist() == pytest.approx(expected, abs=1e-6)
        assert torch.equal(output.logits, modules["model"](x))


@pytest.fixture(scope="module")
def run(tiny: Tiny, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny("fedavg", ASIDE, "run.workers=1"), tmp_path_factory.mktemp("runs") / "run")


def test_as_many_images_are_confident_enough_as_are_predicted_correctly() -> None:
    logits, labels = logits_of(0, 2.0, 4000)
    sums = calibration_sums([(logits, torch.zeros(4000), labels)])
    correct = float((logits.argmax(1) == labels).sum())
    result = Calibration.of([sums | {"validation/correct": correct, "validation/count": 4000.0}], 1)
    assert result is not None
    assert result.threshold is not None
    other, right = logits_of(1, 2.0, 4000)
    confident = float((compute_confidence(other) >= result.threshold).double().mean())
    assert confident == pytest.approx(float((other.argmax(1) == right).double().mean()), abs=0.03)
    largest = other.double().softmax(1).amax(1)
    assert torch.equal(largest.argsort(stable=True)[:100], compute_confidence(other).argsort(stable=True)[:100])
    assert find_threshold([2, 0, 6], 0.5) == pytest.approx(7 / 9)
    assert Calibration.from_json(result.to_json()) == result


def test_a_run_writes_what_all_clients_together_would(tiny: Tiny, run: Path) -> None:
    config = tiny("fedavg", ASIDE)
    federation = open_federation(config)
    trainer = open_session(config, FedAvg(), federation).make_trainer()
    sums = []
    for client in federation.clients:
        assert client.validation is not None
        ctx = load_for_evaluation(trainer, client, {"model": RunFolder(run).weights()}, {}, 3)
        outputs = predict_batches(trainer, client.validation, ctx)
        sums.append(calibration_sums((output.logits, output.novelty, y) for output, y in outputs))
    expected, result = Calibration.of(sums, 3), RunFolder(run).calibration()
    assert result is not None
    assert expected is not None
    assert result.images == 18  # six of each of three domains
    assert result.novelty == expected.novelty
    assert result.temperature == pytest.approx(expected.temperature)


@pytest.mark.parametrize("workers", [2, 3])
def test_it_does_not_depend_on_the_number_of_workers(
    tiny: Tiny, train: Train, run: Path, tmp_path: Path, workers: int
) -> None:
    other = train(tiny("fedavg", ASIDE, f"run.workers={workers}"), tmp_path / "run")
    assert (other / "calibration.json").read_bytes() == (run / "calibration.json").read_bytes()


def test_a_run_that_was_stopped_or_extended_has_the_calibration_of_its_last_round(
    tiny: Tiny, train: Train, run: Path, tmp_path: Path
) -> None:
    out = train(tiny("fedavg", ASIDE, "server.rounds=2"), tmp_path / "run")
    first = RunFolder(out).calibration()
    assert first is not None
    assert first.round == 2
    train(tiny("fedavg", ASIDE), out, resume=True, until=3)
    (out / "summary.json").unlink(missing_ok=True)  # killed before the summary
    train(tiny("fedavg", ASIDE), out, resume=True)
    assert (out / "calibration.json").read_bytes() == (run / "calibration.json").read_bytes()


def test_that_of_an_earlier_round_does_not_count(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    out = train(tiny("fedavg", ASIDE), tmp_path / "run")
    values = json.loads((out / "calibration.json").read_text())
    del values["checksum"]
    (out / "calibration.json").write_text(json.dumps({**values, "round": 2}))
    assert RunFolder(out).calibration() is None


def test_without_images_set_aside_there_is_none(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    out = train(tiny("fedavg"), tmp_path / "run")
    assert not (out / "calibration.json").exists()
    assert RunFolder(out).calibration() is None


@pytest.mark.parametrize(
    "spoil",
    [
        {f"{PREFIX}slope/3": math.nan},
        {f"{PREFIX}novelty/0": -1.0},
        {f"{PREFIX}novelty/0": 0.5},
        {f"{PREFIX}slope/3": None},
        {f"{PREFIX}margin": math.inf},
        {f"{PREFIX}margin": None},
    ],
)
def test_sums_that_cannot_be_are_left_out(spoil: dict[str, float | None]) -> None:
    good = {f"{PREFIX}slope/{n}": float(n - 5) for n in range(len(BETAS))}
    good |= {f"{PREFIX}novelty/{n}": 1.0 for n in range(BINS)} | {f"{PREFIX}margin": 0.0}
    good |= {f"{PREFIX}confidence/{n}": float(BINS / CONFIDENCE_BINS) for n in range(CONFIDENCE_BINS)}
    bad = {name: value for name, value in {**good, **spoil}.items() if value is not None}
    result = Calibration.of([good, bad], 1)
    assert result is not None
    assert result.images == BINS
    assert result.temperature == pytest.approx(1 / BETAS[5])
    assert Calibration.of([bad, {}], 1) is None


@pytest.mark.parametrize("values", ["{", '{"round": 3}', "temperature", "novelty"])
def test_a_damaged_file_is_named_in_one_line(run: Path, tmp_path: Path, values: str) -> None:
    for name in ("calibration.json", "summary.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    if values in ("temperature", "novelty"):
        whole = json.loads((run / "calibration.json").read_text())
        values = json.dumps({**whole, **{"temperature": {"temperature": -1.0}, "novelty": {"novelty": [1]}}[values]})
    (tmp_path / "calibration.json").write_text(values)
    with pytest.raises(InputError, match=r"cannot read .*calibration.json: .*delete it"):
        RunFolder(tmp_path).calibration()


def test_a_calibration_of_an_earlier_version_is_read_under_its_former_name() -> None:
    saved = Calibration(1.5, (1,) * BINS, 3).to_json()
    former = {"unlike" if name == "novelty" else name: value for name, value in saved.items()}
    assert Calibration.from_json(former) == Calibration.from_json(saved)
