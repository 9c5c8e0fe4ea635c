"""Frozen encoders in ONNX Runtime, several encoders side by side, and images at the encoder's own size."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcir import InputError
from fedcir.config import PRETRAINED_SIZES, ModelConfig
from fedcir.data.examples import Normalisation
from fedcir.data.features import BATCH, FeatureCache
from fedcir.models.builder import make_image_builder
from fedcir.models.onnx_encoder import ConversionError, OnnxEncoder, find_onnxruntime

pytest.importorskip("onnxruntime")
BOTH = "efficientnet-lite0+efficientnet-lite2"


def make_images(size: int) -> Tensor:
    return torch.rand(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1


def build_frozen(model: ModelConfig, size: int) -> nn.Module:
    pytest.importorskip("efficientnet_lite_pytorch")
    network = make_image_builder(model, task=3, channels=3, seed=0, image_size=size).frozen
    assert network is not None
    return network


@pytest.mark.parametrize("name", PRETRAINED_SIZES)
def test_onnxruntime_gives_the_features_of_every_pretrained_encoder(name: str) -> None:
    network, x = build_frozen(ModelConfig(name, freeze=True, stages=3), 64), make_images(64)
    with torch.inference_mode():
        expected = network(x)
    torch.testing.assert_close(OnnxEncoder(network, torch.zeros_like(x))(x), expected, rtol=1e-4, atol=1e-4)


def test_encoders_side_by_side_give_the_features_of_each_at_its_own_size() -> None:
    x = make_images(48)
    with torch.inference_mode():
        both = build_frozen(ModelConfig(BOTH, freeze=True), 48)(x)
        single = [build_frozen(ModelConfig(name, freeze=True, native_size=True), 48)(x) for name in BOTH.split("+")]
    assert torch.equal(both, torch.cat(single, dim=1))
    assert both.shape == (BATCH, 2 * 1280)


def test_images_are_resized_to_the_size_of_training() -> None:
    network, x = build_frozen(ModelConfig("efficientnet-lite0", freeze=True, native_size=True), 64), make_images(64)
    plain = build_frozen(ModelConfig("efficientnet-lite0", freeze=True), 224)
    enlarged = nn.functional.interpolate(x, (224, 224), mode="bilinear", align_corners=False)
    with torch.inference_mode():
        torch.testing.assert_close(network(x), plain(enlarged))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (BOTH, {}, "set model.freeze=true"),
        ("efficientnet-lite0+resnet18", {"freeze": True}, "'resnet18' cannot be combined with another"),
        ("efficientnet-lite0+efficientnet-lite0", {"freeze": True}, "names an encoder twice"),
        (BOTH, {"freeze": True, "weights": "w.pth"}, "leave out model.weights"),
        ("resnet18", {"freeze": True, "native_size": True}, "model.native_size is for a frozen efficientnet-lite0"),
        ("efficientnet-lite0", {"native_size": True}, "model.native_size is for a frozen efficientnet-lite0"),
    ],
)
def test_encoders_that_cannot_be_combined_are_refused(name: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig(name, **fields)  # type: ignore[arg-type]


class Unconvertible(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x[:, 0]).real


def test_a_network_that_cannot_be_converted_is_refused() -> None:
    with pytest.raises(ConversionError):
        OnnxEncoder(Unconvertible(), torch.zeros(BATCH, 3, 4, 4))


def test_features_name_what_computed_them_and_fall_back_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path))
    images = np.random.default_rng(0).integers(0, 255, (5, 4, 4, 3), np.uint8)
    normalisation = Normalisation.default(3)
    runtimes = ("torch", str(find_onnxruntime()))
    for network, expected in ((nn.Sequential(nn.Flatten(), nn.Linear(48, 6)), runtimes[1]), (Unconvertible(), "torch")):
        cache = FeatureCache(ModelConfig(), network, normalisation, (4, 4, 3), workers=1)
        values, rows = cache.load([(images, np.arange(5))])
        assert len(values[rows]) == 5
        stores = [name for name in runtimes if (tmp_path / f"features-{cache.key(name)}").exists()]
        assert stores == [expected]


def test_a_network_that_cannot_be_converted_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.AdaptiveAvgPool2d(4)).eval()
    with pytest.raises(ConversionError):
        OnnxEncoder(network, torch.zeros(2, 3, 6, 6))  # 4 does not divide 6
    assert capfd.readouterr().out == ""
