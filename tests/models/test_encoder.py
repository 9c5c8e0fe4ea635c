from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedcir.config import ModelConfig
from fedcir.errors import InputError
from fedcir.models.builder import NetworkBuilder, make_image_builder, make_module_builder
from fedcir.models.classifier import GaussianEncoder


def images(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def cnn_task(seed: int = 0, **fields: object) -> NetworkBuilder:
    return make_image_builder(ModelConfig(name="cnn", width=8, **fields), task=5, channels=3, seed=seed)


@pytest.mark.parametrize("sigma_init", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 20.0])
def test_sigma_starts_at_sigma_init_whatever_the_images(sigma_init: float, scale: float) -> None:
    _, sigma = cnn_task().gaussian_classifier(sigma_init, 1e-3).encoder(images(scale))
    torch.testing.assert_close(sigma, torch.full((8, 128), sigma_init))


def test_mu_starts_at_the_features_so_that_both_classifiers_start_as_the_same_function() -> None:
    builder = cnn_task()
    plain, gaussian = builder.classifier(), builder.gaussian_classifier(0.1, 1e-3)
    mu, _ = gaussian.encoder(images())
    assert torch.equal(mu, plain.encoder(images()))
    assert torch.equal(plain(images()), gaussian(images()))


def test_a_narrower_mu_starts_as_a_random_projection() -> None:
    mu, sigma = cnn_task(latent=6).gaussian_classifier(0.1, 1e-3).encoder(images())
    assert mu.std(0).min() > 0.01
    torch.testing.assert_close(sigma, torch.full((8, 6), 0.1))


def test_sigma_never_goes_below_the_floor() -> None:
    encoder = GaussianEncoder(nn.Identity(), nn.Linear(3, 4), sigma_init=0.1, sigma_floor=0.02)
    nn.init.constant_(encoder.gaussian.bias, -1000.0)
    _, sigma = encoder(torch.zeros(1, 3))
    assert sigma[0].tolist() == pytest.approx([0.02, 0.02])


def test_sigma_is_the_softplus_of_the_second_half() -> None:
    gaussian = nn.Linear(1, 4)
    encoder = GaussianEncoder(nn.Identity(), gaussian, sigma_init=1.0, sigma_floor=0.5)
    with torch.no_grad():
        gaussian.weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [-1.0]]))
        gaussian.bias.zero_()
    mu, sigma = encoder(torch.tensor([[2.0]]))
    assert mu.tolist() == [[2.0, 4.0]]
    assert sigma[0].tolist() == pytest.approx([6.002476 + 0.5, 0.126928 + 0.5])  # log(1 + e^6), log(1 + e^-2)


def test_forward_is_the_head_on_mu() -> None:
    model = cnn_task().gaussian_classifier(0.1, 1e-3).eval()
    mu, _ = model.encoder(images())
    expected = mu @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(images()), expected)
    assert torch.equal(model(images()), model(images()))  # nothing is sampled


def test_both_classifiers_start_from_the_same_backbone() -> None:
    builder = cnn_task()
    plain, gaussian = builder.classifier(), builder.gaussian_classifier(0.1, 1e-3)
    own = plain.encoder.state_dict()
    other = gaussian.encoder.backbone.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert torch.equal(plain.head.weight, gaussian.head.weight)  # z is as wide as the features


def test_weights_depend_on_the_seed_and_on_nothing_drawn_before() -> None:
    first = cnn_task(seed=0).classifier().state_dict()
    torch.randn(5)
    again, other = cnn_task(seed=0).classifier().state_dict(), cnn_task(seed=1).classifier().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["encoder.convs.0.weight"], other["encoder.convs.0.weight"])
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_both_classifiers_name_their_head_alike() -> None:
    for model in (cnn_task().classifier(), cnn_task().gaussian_classifier(0.1, 1e-3)):
        names = list(model.state_dict())
        assert {name.split(".")[0] for name in names} == {"encoder", "head"}
        assert [name for name in names if name.startswith("head")] == ["head.weight", "head.bias"]


def test_latent_sets_the_width_of_z_and_leaves_the_deterministic_encoder_alone() -> None:
    builder = cnn_task(latent=6)
    model = builder.gaussian_classifier(0.1, 1e-3)
    mu, sigma = model.encoder(images())
    assert mu.shape == sigma.shape == (8, 6)
    assert model.head.in_features == 6
    assert builder.classifier().head.in_features == 128
    assert builder.generator(builder.latent, noise=2, hidden=3).outer.out_features == 6


def test_a_callers_module_starts_from_its_own_weights_and_is_left_alone() -> None:
    mine = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.BatchNorm1d(7))
    before = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
    builder = make_module_builder(mine, torch.randn(4, 3, 2, 2), task=3, latent=None, seed=0)
    model = builder.classifier()
    nn.init.zeros_(model.encoder[1].weight)
    assert (builder.features, builder.latent) == (7, 7)
    assert mine.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in mine.state_dict().items())


def test_a_callers_module_must_give_one_row_of_features_a_sample() -> None:
    with pytest.raises(InputError, match=r"\(batch, features\), got the shape \[2, 3, 4, 4\]"):
        make_module_builder(nn.Identity(), torch.zeros(2, 3, 4, 4), task=3, latent=None, seed=0)


def test_weights_of_a_cnn_load_into_a_cnn(tmp_path: Path) -> None:
    torch.save(cnn_task(seed=1).encoder().state_dict(), tmp_path / "cnn.pth")
    loaded = cnn_task(weights=str(tmp_path / "cnn.pth")).encoder()
    assert torch.equal(loaded.fc.weight, cnn_task(seed=1).encoder().fc.weight)


def test_making_a_task_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    cnn_task().classifier()
    assert torch.equal(torch.get_rng_state(), before)
