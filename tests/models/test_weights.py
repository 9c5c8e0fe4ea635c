"""Published weights find their place whatever their names begin with, and what does not fit is told."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedcir.errors import InputError
from fedcir.models.pretrained import load_weights, match_names, read_weights
from fedcir.types import Tensors


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def published(prefix: str = "", drop: str = "") -> Tensors:
    torch.manual_seed(7)
    bag = {name.removeprefix(drop): torch.randn_like(t.float()) for name, t in network().state_dict().items()}
    return {f"{prefix}{name}": tensor for name, tensor in bag.items()} | {"classifier.weight": torch.ones(9, 4)}


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "backbone.", "module.encoder_q."])
def test_a_prefix_of_the_file_is_taken_off(prefix: str) -> None:
    net, given = network(), published(prefix)
    load_weights(net, given, "x.pth")
    assert torch.equal(net[0].weight, given[f"{prefix}0.weight"])
    assert torch.equal(net[1].running_var, given[f"{prefix}1.running_var"])


def test_a_prefix_of_the_network_is_put_on() -> None:
    net, given = nn.ModuleDict({"encoder": network()}), published()
    load_weights(net, given, "x.pth")
    assert torch.equal(net["encoder"][0].weight, given["0.weight"])


def test_the_prefix_that_fits_most_names_wins() -> None:
    given = {**published("teacher."), "student.0.weight": torch.zeros(4, 3, 1, 1)}
    result = match_names(given, network().state_dict())
    assert torch.equal(result["0.weight"], given["teacher.0.weight"])


def test_old_files_without_step_counters_load() -> None:
    given = {name: t for name, t in published().items() if not name.endswith("num_batches_tracked")}
    load_weights(network(), given, "x.pth")


def test_what_does_not_fit_is_counted_and_named_in_one_line() -> None:
    given = published()
    given["0.weight"] = torch.zeros(8, 3, 1, 1)
    del given["1.bias"], given["1.weight"]
    with pytest.raises(InputError) as message:
        load_weights(network(), given, "x.pth")
    assert str(message.value) == (
        "model.weights: x.pth does not fit Sequential, which has 7 tensors: "
        "2 missing (1.weight float32[4], 1.bias float32[4]); "
        "1 of another shape (0.weight is float32[8, 3, 1, 1], expected float32[4, 3, 1, 1]); "
        "1 in the file only (classifier.weight float32[9, 4])"
    )


def test_weights_of_another_network_change_nothing() -> None:
    net = network()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(InputError, match=r"6 missing \(0\.weight .*, \.\.\.\); 1 in the file only \(layer\.q "):
        load_weights(net, {"layer.q": torch.zeros(1)}, "x.pth")
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("under", ["state_dict", "model_state_dict", "model"])
def test_a_state_dict_is_found_beside_an_optimiser(under: str, tmp_path: Path) -> None:
    torch.save({under: published(), "epoch": 3}, tmp_path / "x.pth")
    assert read_weights(tmp_path / "x.pth").keys() == published().keys()
