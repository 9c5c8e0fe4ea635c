import numpy as np
import pytest
import torch
from torch import Tensor

from fedcir.models.classifier import Generator, make_balanced_labels
from fedcir.models.tensors import snapshot

CLASSES, LATENT, NOISE, HIDDEN = 3, 4, 2, 6
Y = torch.tensor([0, 1, 2, 2, 1])


@pytest.fixture
def generator() -> Generator:
    torch.manual_seed(0)
    made = Generator(CLASSES, LATENT, NOISE, HIDDEN)
    for name in ("weight", "bias", "running_mean", "running_var"):
        getattr(made.norm, name).data.uniform_(0.5, 2.0)
    return made


def noise() -> Tensor:
    return torch.randn(len(Y), NOISE, generator=torch.Generator().manual_seed(1))


def hidden(generator: Generator) -> np.ndarray:
    """What comes into BatchNorm."""
    x = np.concatenate([noise(), np.eye(CLASSES)[Y]], axis=1)
    return x @ generator.inner.weight.detach().numpy().T


def by_numpy(generator: Generator, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """The generator's output with these statistics in its BatchNorm."""
    w = {name: tensor.numpy() for name, tensor in snapshot(generator).items()}
    h = (hidden(generator) - mean) / np.sqrt(var + 1e-5) * w["norm.weight"] + w["norm.bias"]
    return np.maximum(h, 0) @ w["outer.weight"].T + w["outer.bias"]


@pytest.mark.parametrize("statistics", ["batch", "update"])
def test_batch_and_update_normalise_by_the_batch(generator: Generator, statistics: str) -> None:
    h = hidden(generator)
    expected = by_numpy(generator, h.mean(0), h.var(0))
    z = generator(noise(), Y, statistics).detach()
    np.testing.assert_allclose(z, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [True, False])
def test_running_normalises_by_what_is_remembered(generator: Generator, mode: bool) -> None:
    norm = generator.norm
    expected = by_numpy(generator, norm.running_mean.numpy(), norm.running_var.numpy())
    np.testing.assert_allclose(generator.train(mode)(noise(), Y).detach(), expected, rtol=1e-4, atol=1e-5)


def test_update_remembers_a_tenth_of_the_batch(generator: Generator) -> None:
    before, h = snapshot(generator), hidden(generator)
    generator.eval()(noise(), Y, "update")  # in evaluation mode too
    after = snapshot(generator)
    mean = 0.9 * before["norm.running_mean"].numpy() + 0.1 * h.mean(0)
    var = 0.9 * before["norm.running_var"].numpy() + 0.1 * h.var(0, ddof=1)
    np.testing.assert_allclose(after["norm.running_mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(after["norm.running_var"], var, rtol=1e-5)
    assert after["norm.num_batches_tracked"] == before["norm.num_batches_tracked"] + 1


@pytest.mark.parametrize("statistics", ["batch", "running"])
@pytest.mark.parametrize("mode", [True, False])
def test_batch_and_running_write_nothing(generator: Generator, statistics: str, mode: bool) -> None:
    before = snapshot(generator)
    generator.train(mode)(noise(), Y, statistics)
    after = snapshot(generator)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_one_class_alone_in_a_batch_loses_its_class(generator: Generator) -> None:
    # Why the class Gaussians come from one batch that holds all classes: BatchNorm takes a constant away.
    alone = [generator(noise(), torch.full_like(Y, label), "batch") for label in (0, 1)]
    torch.testing.assert_close(alone[0], alone[1], rtol=1e-3, atol=1e-5)
    mixed = generator(noise().repeat(2, 1), torch.tensor([0] * 5 + [1] * 5), "batch")
    assert (mixed[:5] - mixed[5:]).abs().max() > 0.1


def test_every_parameter_has_a_gradient_that_is_more_than_rounding_noise(generator: Generator) -> None:
    generator(noise(), Y, "update").square().sum().backward()
    for name, parameter in generator.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 1e-3, name


def test_draw_depends_on_its_generator_only(generator: Generator) -> None:
    def draw(seed: int) -> Tensor:
        return generator.draw(7, torch.Generator().manual_seed(seed))

    first = draw(0)
    torch.randn(3)
    assert first.shape == (7, NOISE)
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))


def test_draws_are_standard_normal(generator: Generator) -> None:
    drawn = generator.draw(20_000, torch.Generator().manual_seed(0))
    assert drawn.mean().item() == pytest.approx(0, abs=0.03)
    assert drawn.std().item() == pytest.approx(1, abs=0.03)


def test_all_classes_holds_every_class_equally_and_in_order() -> None:
    assert make_balanced_labels(3, 2).tolist() == [0, 0, 1, 1, 2, 2]


def test_generated_samples_come_back_by_class(generator: Generator) -> None:
    labels = make_balanced_labels(CLASSES, 5)
    assert (labels.view(CLASSES, 5) == torch.arange(CLASSES)[:, None]).all()
