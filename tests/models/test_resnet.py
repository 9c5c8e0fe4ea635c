from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedcir.config import ModelConfig
from fedcir.errors import InputError
from fedcir.models.builder import make_image_builder
from fedcir.models.networks import ResNet18


def torchvision_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of torchvision's resnet18 without fc."""
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(name: str, channels: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.{part}"] = (channels,)
        shapes[f"{name}.num_batches_tracked"] = ()

    shapes["conv1.weight"] = (64, 3, 7, 7)
    norm("bn1", 64)
    for stage, (before, channels) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)], start=1):
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            shapes[f"{name}.conv1.weight"] = (channels, channels if block else before, 3, 3)
            shapes[f"{name}.conv2.weight"] = (channels, channels, 3, 3)
            norm(f"{name}.bn1", channels)
            norm(f"{name}.bn2", channels)
        if stage > 1:
            shapes[f"layer{stage}.0.downsample.0.weight"] = (channels, before, 1, 1)
            norm(f"layer{stage}.0.downsample.1", channels)
    return shapes


def load(path: Path, **fields: object) -> nn.Module:
    """An encoder of width 8 with the weights in this file."""
    config = ModelConfig(**{"name": "resnet18", "width": 8, "weights": str(path), **fields})
    return make_image_builder(config, task=5, channels=3, seed=0).encoder()


@pytest.fixture
def published() -> dict[str, Tensor]:
    """The weights of some network of width 8, with the classifier that published ones have."""
    torch.manual_seed(99)
    return {**ResNet18(width=8).state_dict(), "fc.weight": torch.ones(1000, 64), "fc.bias": torch.ones(1000)}


def test_names_and_shapes_are_torchvisions() -> None:
    assert {name: tuple(tensor.shape) for name, tensor in ResNet18().state_dict().items()} == torchvision_shapes()


def test_it_has_as_many_parameters_as_torchvisions_without_its_classifier() -> None:
    assert sum(p.numel() for p in ResNet18().parameters()) == 11_689_512 - 512 * 1000 - 1000 == 11_176_512


def test_images_of_any_size_become_features() -> None:
    net = ResNet18(width=8).eval()
    assert net.features == 64
    for side in (32, 65):
        assert net(torch.zeros(2, 3, side, side)).shape == (2, 64)


def test_each_stage_but_the_first_halves_the_map() -> None:
    net = ResNet18(width=8).eval()
    x = torch.zeros(1, 8, 32, 32)
    sides = [(x := stage(x)).shape[-1] for stage in (net.layer1, net.layer2, net.layer3, net.layer4)]
    assert sides == [32, 16, 8, 4]


def test_a_block_adds_its_input() -> None:
    block = ResNet18(width=8).layer1[0].eval()
    nn.init.zeros_(block.bn2.weight)  # nothing but the shortcut is left
    x = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x), x.relu())


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_published_weights_load_without_their_classifier(
    ending: str, published: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / f"resnet18{ending}"
    (torch.save if ending == ".pth" else save_file)(published, path)
    loaded = load(path).state_dict()
    assert loaded.keys() == {name for name in published if not name.startswith("fc.")}
    assert all(torch.equal(tensor, published[name]) for name, tensor in loaded.items())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.weights: no file .*nowhere\.pth"):
        load(tmp_path / "nowhere.pth")


def test_weights_of_another_width_do_not_fit(published: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(published, tmp_path / "narrow.pth")
    with pytest.raises(InputError, match=r"narrow\.pth does not fit ResNet18, .*100 of another shape"):
        load(tmp_path / "narrow.pth", width=16)


def test_a_missing_tensor_is_named(published: dict[str, Tensor], tmp_path: Path) -> None:
    del published["layer4.1.bn2.bias"]
    save_file(published, tmp_path / "part.safetensors")
    with pytest.raises(InputError, match=r"part\.safetensors does not fit .*: 1 missing \(layer4\.1\.bn2\.bias "):
        load(tmp_path / "part.safetensors")


def test_group_norm_takes_weights_and_biases_of_published_batch_norm(
    published: dict[str, Tensor], tmp_path: Path
) -> None:
    published["bn1.bias"] = torch.arange(8.0)
    torch.save(published, tmp_path / "batch.pth")
    net = load(tmp_path / "batch.pth", norm="group")
    assert isinstance(net, ResNet18)
    assert isinstance(net.bn1, nn.GroupNorm)
    assert net.bn1.bias.tolist() == list(range(8))


class RunsCode:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 / 0",)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"conv1.weight": RunsCode()}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match=r"model\.weights: .*evil\.pth"):
        load(tmp_path / "evil.pth")


@pytest.mark.parametrize("name", ["text.pth", "text.safetensors"])
def test_a_file_of_something_else_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("not weights")
    with pytest.raises(InputError, match=rf"model\.weights: .*{name}"):
        load(tmp_path / name)


@pytest.mark.parametrize("content", ["empty", "list", "numbered"])
def test_an_empty_file_or_another_object_is_an_input_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.pth"
    if content == "empty":
        path.write_bytes(b"")
    else:
        torch.save([torch.zeros(2)] if content == "list" else {0: torch.zeros(2)}, path)
    with pytest.raises(InputError, match=r"odd\.pth"):
        load(path)


def test_group_norm_keeps_no_running_statistics() -> None:
    net = ResNet18(width=16, norm="group")
    assert list(net.buffers()) == []
    assert not any(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    assert net(torch.zeros(1, 3, 32, 32)).shape == (1, 128)


def test_group_norm_takes_any_width() -> None:
    for width in (1, 7, 16, 28, 56):
        ResNet18(width=width, norm="group")
