"""Where stages end, in our encoders and in those of others, and what happens there."""

import pytest
import torch
from torch import Tensor, nn

from fedcir.models.networks import CNN, FeatureStatistics, ResNet18, StageStatistics, find_stage_ends, transform_stages


def conv(before: int, after: int) -> nn.Module:
    return nn.Conv2d(before, after, 3, padding=1)


PLAIN = nn.Sequential(
    conv(3, 4), nn.ReLU(), nn.MaxPool2d(2), conv(4, 6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
)
WRAPPED = nn.Sequential(nn.Sequential(nn.Sequential(conv(3, 4), nn.ReLU()), nn.Sequential(conv(4, 6))), nn.Flatten())


@pytest.mark.parametrize(
    ("encoder", "ends"),
    [
        (CNN(width=2), {"ends.0": 2, "ends.1": 4, "ends.2": 8}),
        (ResNet18(width=2), {"stem": 2, "layer1": 2, "layer2": 4, "layer3": 8, "layer4": 16}),
        (PLAIN, {"2": 4, "4": 6}),
        (WRAPPED, {"0.0": 4, "0.1": 6}),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), {"": 5}),
        (nn.Flatten(), {"": 192}),
    ],
    ids=["cnn", "resnet18", "plain", "wrapped", "vectors", "flat"],
)
def test_stages_end_before_the_next_convolution(encoder: nn.Module, ends: dict[str, int]) -> None:
    assert find_stage_ends(encoder, torch.zeros(2, 3, 8, 8)) == ends


def test_a_layer_that_is_used_twice_ends_no_stage() -> None:
    relu = nn.ReLU()
    encoder = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), relu, conv(4, 6), relu, nn.Flatten())
    assert find_stage_ends(encoder, torch.zeros(2, 3, 8, 8)) == {"1": 4, "3": 6}


def test_looking_for_stages_leaves_the_encoder_as_it_was() -> None:
    encoder = CNN(width=2).train()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    find_stage_ends(encoder, torch.ones(2, 3, 8, 8))
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    assert encoder.training
    assert not any(part._forward_hooks for part in encoder.modules())


def test_what_passes_is_changed_within_and_not_after() -> None:
    encoder, x = PLAIN.eval(), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    seen: list[tuple[int, list[int]]] = []

    def change(number: int, out: Tensor) -> Tensor:
        seen.append((number, list(out.shape)))
        return out * (number + 1)

    with torch.no_grad():
        plain = encoder(x)
        with transform_stages(encoder, ("2", "4"), change):
            changed = encoder(x)
        assert torch.equal(changed, 2 * plain)
        assert torch.equal(encoder(x), plain)
    assert seen == [(0, [2, 4, 4, 4]), (1, [2, 6, 4, 4])]


def test_running_statistics_move_towards_the_mean_over_the_batch() -> None:
    (running,) = FeatureStatistics({"layer1": 2})
    assert isinstance(running, StageStatistics)
    running.update(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), torch.tensor([[3.0, 1.0], [5.0, 1.0]]), momentum=0.75)
    assert running.mean.tolist() == [0.5, 0.5]  # 3/4 of 0 and 1/4 of 2
    assert running.std.tolist() == [1.75, 1.0]  # 3/4 of 1 and 1/4 of 4 and 1


def test_marks_at_the_ends_of_stages_are_no_part_of_the_weights() -> None:
    for encoder in (CNN(width=2), ResNet18(width=2)):
        assert not [name for name in encoder.state_dict() if name.startswith(("ends", "stem"))]
