import pytest
import torch

from fedcir.errors import InputError
from fedcir.models.networks import CNN, StagedEncoder
from fedcir.models.pretrained import ResizedEncoder


def test_the_averaged_maps_of_the_last_stages_follow_the_features() -> None:
    encoder = CNN(channels=3, norm="batch", width=2).eval()
    x = torch.randn(2, 3, 16, 16)
    features = encoder(x)
    outputs: list[torch.Tensor] = []
    staged = StagedEncoder(encoder, x, 1)
    encoder.get_submodule(staged.names[0]).register_forward_hook(lambda module, inputs, output: outputs.append(output))
    result = staged(x)
    assert torch.equal(result[:, : features.shape[1]], features)
    assert torch.equal(result[:, features.shape[1] :], outputs[0].mean((2, 3)))


def test_more_stages_than_there_are_are_refused() -> None:
    with pytest.raises(InputError, match=r"model\.stages is 9"):
        StagedEncoder(CNN(channels=3, norm="batch", width=2), torch.zeros(1, 3, 16, 16), 9)


def test_encoders_with_other_stages_or_sizes_have_other_texts() -> None:
    """The text of an encoder is part of the key of its cached features."""
    encoder, x = CNN(channels=3, norm="batch", width=2).eval(), torch.zeros(1, 3, 16, 16)
    staged = [StagedEncoder(encoder, x, stages) for stages in (1, 2)]
    assert len({str(network) for network in (*staged, *(ResizedEncoder(encoder, size) for size in (16, 24)))}) == 4
