"""A model at a new site: adapted to unlabelled images, with an estimate, and refused where the site is too unlike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bands import CLASSES, write_pictures
from PIL import Image
from scipy.special import softmax

import fedcir
from fedcir import InputError, Predictor
from fedcir.config import Config
from fedcir.data.domains import Split
from fedcir.inference.adaptation import MEAN_IMAGES, SiteEstimate, adapt_model
from fedcir.inference.model import open_model
from fedcir.models.site_statistics import PRIOR_IMAGES, shrink_statistics

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def closed_form(
    settings: Callable[..., Config], train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    config = settings("fedcirone", "server.rounds=1", "model.freeze=true", "algorithm.standardise=domain")
    return train(config, tmp_path_factory.mktemp("runs") / "closed")


@pytest.fixture(scope="module")
def dusk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("new"), ("dusk",), CLASSES, count=5, seed=3)


@pytest.fixture(scope="module")
def dark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that are almost black, such as those of a covered camera."""
    folder = tmp_path_factory.mktemp("dark")
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 20, (20, 8, 8, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def as_split(images: np.ndarray) -> Split:
    return Split(images, np.zeros(len(images), np.int64), "")


def test_statistics_are_shrunk_by_the_number_of_images() -> None:
    z = np.random.default_rng(1).normal(3, 2, (60, 4))
    mean, scale = shrink_statistics(torch.from_numpy(z), torch.ones(4), torch.full((4,), 5.0))
    share = 60 / (60 + PRIOR_IMAGES)
    assert np.allclose(mean, share * z.mean(0) + (1 - share), atol=1e-6)
    assert np.allclose(scale, np.sqrt(share * z.var(0) + (1 - share) * 25), atol=1e-6)


def test_one_image_changes_statistics_little_and_many_replace_them() -> None:
    z = torch.full((100_000, 1), 4.0) + torch.arange(100_000)[:, None] % 2
    few, many = (shrink_statistics(z[:count], torch.zeros(1), torch.ones(1)) for count in (1, len(z)))
    assert few[0].item() == pytest.approx(4 / (1 + PRIOR_IMAGES))
    assert 0.9 < few[1].item() < 1
    assert [value.item() for value in many] == pytest.approx([4.5, 0.5], abs=2e-3)


def test_adaptation_is_standardisation_by_hand_and_leaves_the_model_alone(closed_form: Path) -> None:
    model = open_model(closed_form, device="cpu")
    encoder, head = model.network.encoder, model.network.head
    mean, scale = encoder.mean.clone().numpy(), encoder.scale.clone().numpy()
    adapted, estimate = adapt_model(model, as_split(IMAGES))
    with torch.no_grad():
        z = encoder.encoder(model.inputs(IMAGES)).double().numpy()
    share = 6 / (6 + PRIOR_IMAGES)
    spread = np.sqrt(share * z.var(0) + (1 - share) * scale**2)
    standardised = (z - (share * z.mean(0) + (1 - share) * mean)) / spread
    logits = standardised @ head.weight.double().numpy().T + head.bias.double().numpy()
    assert np.allclose(adapted.compute(IMAGES).logits, logits, rtol=1e-3, atol=1e-3)
    probabilities, novelty = adapted.predict(IMAGES)
    assert estimate is not None
    threshold = model.calibration.threshold
    assert threshold is not None
    confident = -np.log(1 - softmax(logits, axis=-1).max(-1)) / 10 >= threshold
    expected = (MEAN_IMAGES * float(probabilities.amax(-1).mean()) + confident.sum()) / (MEAN_IMAGES + len(logits))
    assert estimate.accuracy == pytest.approx(expected, rel=1e-4)
    assert estimate.novelty == pytest.approx(float(novelty.mean()), rel=1e-4)
    assert np.array_equal(encoder.mean, mean)
    assert model.features is None
    assert adapted.features is None


def test_a_model_with_batchnorm_gets_the_statistics_of_the_site(run: Path) -> None:
    adapted, _ = adapt_model(open_model(run, device="cpu"), as_split(IMAGES))
    plain = open_model(run, device="cpu")
    assert not torch.equal(adapted.compute(IMAGES).logits, plain.compute(IMAGES).logits)
    assert torch.equal(adapted.network.head.weight, plain.network.head.weight)


def test_a_site_is_refused_by_its_mean_novelty() -> None:
    SiteEstimate(50, 0.7, 0.84).check("dusk")
    with pytest.raises(InputError, match=r"^dusk is too unlike .*the mean novelty of 50 images is 0\.85 .*with force$"):
        SiteEstimate(50, 0.7, 0.85).check("dusk")


def test_evaluate_adapts_a_closed_form_and_says_what_was_expected(closed_form: Path, dusk: Path) -> None:
    result = fedcir.evaluate(closed_form, data_root=dusk, split="all", adapt=True, force=True, device="cpu")
    (domain,) = result.domains
    assert domain.estimate is not None
    assert domain.estimate.images == 15
    assert result.to_json()["domains"]["dusk"]["expected"]["accuracy"] == domain.estimate.accuracy
    assert result.mean_before is not None


def test_predict_adapts_to_a_folder(closed_form: Path, dusk: Path, fedcir: Callable[..., Any]) -> None:
    image = next((dusk / "dusk" / "low").iterdir())
    output = fedcir("predict", closed_form, image, "--site-images", dusk, "--force", "--device", "cpu", "--json")
    assert "adapted to 15 images" in output.err
    assert "rough estimate" in output.err
    (adapted,) = Predictor(closed_form, site_images=[dusk], force=True, device="cpu")(image)
    assert str(adapted.probability) in output.out


def test_a_site_too_unlike_ends_predict_with_2_unless_forced(
    closed_form: Path, dark: Path, fedcir: Callable[..., Any]
) -> None:
    call = ("predict", closed_form, dark, "--site-images", dark, "--device", "cpu", "--csv")
    output = fedcir(*call)
    assert output.code == 2
    assert "is too unlike the sites that the model was trained on" in output.err.splitlines()[-1]
    assert "Traceback" not in output.err
    assert not output.out
    assert fedcir(*call, "--force").out.count("\n") == 21


def test_a_folder_without_images_is_refused(closed_form: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no images"):
        Predictor(closed_form, site_images=[tmp_path])
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"no image")
    with pytest.raises(InputError, match=r"none of the 2 site images can be read, such as .*a\.png"):
        Predictor(closed_form, site_images=[tmp_path])


def test_a_model_without_statistics_cannot_be_adapted(plain: Path, dusk: Path) -> None:
    with pytest.raises(
        InputError, match=r"no statistics of features or of BatchNorm.* leave the images of the site out"
    ):
        Predictor(plain, site_images=[dusk])
