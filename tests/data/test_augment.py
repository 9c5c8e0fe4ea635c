"""Training images changed at random."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedcir as library
from fedcir.client.client_requests import evaluate_client
from fedcir.client.local_update import LocalTrainer, train_client
from fedcir.config import Config
from fedcir.data.examples import _crop, _flip, _jitter_colour, augment
from fedcir.data.federation import open_federation
from fedcir.rng import numpy_rng, torch_rng
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run

Tiny = Callable[..., Config]
Train = Callable[..., Path]

ALL = ("flip", "crop", "colour")
ON = "local.augment=flip,crop,colour"
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def images(count: int = 8, height: int = 6, width: int = 5, channels: int = 3) -> Tensor:
    return torch.randn(count, channels, height, width, generator=torch_rng(0, "images"))


def draws(*values: float) -> Tensor:
    """The same three draws for one image."""
    return torch.tensor(values).view(3, 1)


def ramp(height: int, width: int) -> Tensor:
    """An image whose every pixel is the number of its column."""
    return torch.arange(float(width)).expand(1, 3, height, width).clone()


def test_nothing_is_changed_and_nothing_drawn_where_nothing_is_asked_for() -> None:
    x, rng = images(), torch_rng(0)
    assert augment(x, (), rng) is x
    assert torch.equal(rng.get_state(), torch_rng(0).get_state())


def test_flip_mirrors_the_images_it_draws_and_no_other() -> None:
    x = images(1000)
    mirrored = torch.rand(3, 1000, generator=torch_rng(5))[0] < 0.5
    changed = augment(x, ["flip"], torch_rng(5))
    assert torch.equal(changed[mirrored], x[mirrored].flip(3))
    assert torch.equal(changed[~mirrored], x[~mirrored])
    assert 500 - 64 < mirrored.sum() < 500 + 64  # four standard deviations


@pytest.mark.parametrize(("first", "result"), [(0.0, [3.0, 2.0, 1.0, 0.0]), (0.5, [0.0, 1.0, 2.0, 3.0])])
def test_flip_is_left_to_right(first: float, result: list[float]) -> None:
    assert _flip(ramp(2, 4), draws(first, 0, 0))[0, 0].tolist() == [result, result]


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        # A window of 3 of 4 pixels in the middle: centres are 3/4 apart, about 1.5.
        ((0.0, 0.5, 0.5), [0.375, 1.125, 1.875, 2.625]),
        # All the way to the right it begins at 1, its first centre 3/8 later; centres are counted from 1/2 on.
        ((0.0, 1.0, 0.5), [0.875, 1.625, 2.375, 3.0]),
        ((0.0, 0.0, 0.5), [0.0, 0.625, 1.375, 2.125]),
        # A window of 3.5 pixels: centres are 7/8 apart.
        ((0.5, 0.5, 0.5), [0.1875, 1.0625, 1.9375, 2.8125]),
        ((1.0, 0.9, 0.1), [0.0, 1.0, 2.0, 3.0]),
    ],
)
def test_crop_by_hand(values: tuple[float, float, float], columns: list[float]) -> None:
    across = _crop(ramp(6, 4), draws(*values))
    assert across[0, 1] == pytest.approx(np.tile(columns, (6, 1)), abs=1e-5)
    size, right, down = values
    turned = _crop(ramp(6, 4).transpose(2, 3).contiguous(), draws(size, down, right))
    assert turned == pytest.approx(across.transpose(2, 3).numpy(), abs=1e-5)


def test_a_crop_of_the_whole_is_the_image() -> None:
    x = images()
    whole = torch.rand(3, len(x), generator=torch_rng(1))
    whole[0] = 1.0
    assert torch.allclose(_crop(x, whole), x, atol=1e-5)


def test_a_crop_stays_within_the_range_of_each_image() -> None:
    x = images(200)
    changed = augment(x, ["crop"], torch_rng(0))
    low, high = x.amin((2, 3)), x.amax((2, 3))
    assert (changed.amin((2, 3)) >= low - 1e-5).all()
    assert (changed.amax((2, 3)) <= high + 1e-5).all()
    assert ((changed - x).abs().amax((1, 2, 3)) > 0.01).all()


def test_colour_in_the_middle_of_its_draws_is_the_image() -> None:
    assert torch.allclose(_jitter_colour(images(), torch.full((3, 8), 0.5)), images(), atol=1e-6)


@pytest.mark.parametrize(
    ("values", "result"),
    [
        # One red pixel (3, 0, 0), grey 1, beside a black one; the mean of all is 0.5.
        ((1.0, 0.5, 0.5), [[3.4, 0.4], [0.4, 0.4], [0.4, 0.4]]),
        ((0.0, 0.5, 0.5), [[2.6, -0.4], [-0.4, -0.4], [-0.4, -0.4]]),
        ((0.5, 1.0, 0.5), [[4.0, -0.2], [-0.2, -0.2], [-0.2, -0.2]]),  # 0.5 + 1.4 (x - 0.5)
        ((0.5, 0.5, 1.0), [[3.8, 0.0], [-0.4, 0.0], [-0.4, 0.0]]),  # 1 + 1.4 (x - 1)
        ((0.5, 0.5, 0.0), [[2.2, 0.0], [0.4, 0.0], [0.4, 0.0]]),  # 1 + 0.6 (x - 1)
    ],
)
def test_colour_by_hand(values: tuple[float, float, float], result: list[list[float]]) -> None:
    x = torch.zeros(1, 3, 1, 2)
    x[0, 0, 0, 0] = 3.0
    assert _jitter_colour(x, draws(*values))[0, :, 0] == pytest.approx(np.array(result), abs=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_each_image_is_changed_by_its_own_draws_alone(channels: int) -> None:
    x, y = images(channels=channels), images(channels=channels)
    y[1:] = 0
    assert torch.equal(augment(x, ALL, torch_rng(0))[0], augment(y, ALL, torch_rng(0))[0])


def test_kinds_are_done_in_the_order_given_each_with_draws_of_its_own() -> None:
    rng = torch_rng(3)
    first, second = (torch.rand(3, 8, generator=rng) for _ in range(2))
    assert torch.equal(augment(images(), ["crop", "flip"], torch_rng(3)), _flip(_crop(images(), first), second))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ALL)
def test_the_memory_layout_is_kept(kind: str, layout: torch.memory_format) -> None:
    x = images().contiguous(memory_format=layout)
    changed = augment(x, [kind], torch_rng(0))
    assert changed.is_contiguous(memory_format=layout)
    assert torch.allclose(changed, augment(images(), [kind], torch_rng(0)), atol=1e-6)


def model(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def test_off_is_the_default_and_a_run_begun_without_the_setting_goes_on(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    plain = train(tiny("fedavg"), tmp_path / "plain")
    assert model(train(tiny("fedavg", "local.augment=[]"), tmp_path / "empty")) == model(plain)
    assert model(train(tiny("fedavg", ON), tmp_path / "on")) != model(plain)
    begun = train(tiny("fedavg"), tmp_path / "begun", until=1)
    config = begun / "config.toml"  # as a fedcir without the setting wrote it
    text, count = re.subn(r"^(augment|checksum) = .*\n", "", config.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert count == 2
    config.write_text(text, encoding="utf-8")
    assert model(train(tiny("fedavg"), begun, resume=True)) == model(plain)


@pytest.mark.parametrize("algorithm", ["fedcir", "centralized"])
def test_a_run_stopped_on_its_way_ends_in_the_same_bits(
    tiny: Tiny, train: Train, tmp_path: Path, algorithm: str
) -> None:
    config = tiny(algorithm, ON, "server.active=2")
    whole, stopped = train(config, tmp_path / "whole"), train(config, tmp_path / "stopped", until=1)
    assert model(train(config, stopped, resume=True)) == model(whole)
    assert RunFolder(stopped).config().local.augment == ALL


def workers(tiny: Tiny, *assignments: str) -> tuple[LocalTrainer, Any, dict[str, Any]]:
    """A client's side of a run, its clients, and what they are sent first."""
    config = tiny("fedavg", "run.layout=channels_last", *assignments)
    federation = open_federation(config)
    with open_run(config) as (session, _):
        return session.make_trainer(), federation.clients, session.state.shared


def test_a_clients_changes_depend_on_seed_round_and_client_only(tiny: Tiny) -> None:
    def trained(order: list[int], round: int = 1, *assignments: str) -> dict[int, list[bytes]]:
        worker, clients, shared = workers(tiny, ON, *assignments)
        replies = {number: train_client(worker, clients[number], shared, {}, round)[0] for number in order}
        return {n: [t.numpy().tobytes() for t in reply.tensors["model"].values()] for n, reply in replies.items()}

    first = trained([0, 1, 2])
    assert trained([2, 0, 1]) == first
    assert trained([1])[1] == first[1]
    assert trained([1], 2)[1] != first[1]
    assert trained([1], 1, "run.seed=1")[1] != first[1]


@pytest.mark.parametrize(("round", "number"), [(1, 0), (2, 0), (1, 2)])
def test_what_a_client_trains_on_is_its_batch_changed_by_draws_of_its_own(tiny: Tiny, round: int, number: int) -> None:
    seen: list[Tensor] = []

    class Seeing(library.FedAvg):
        def local_loss(self, modules: Any, x: Tensor, y: Tensor, ctx: Any) -> library.Losses:
            seen.append(x.clone())
            return super().local_loss(modules, x, y, ctx)

    worker, clients, shared = workers(tiny, ON, "run.seed=3")
    train_client(replace(worker, algorithm=Seeing()), clients[number], shared, {}, round)
    draws = torch_rng(3, "augment", round, number)
    positions = numpy_rng(3, "batches", round, number).permutation(24)
    for step, x in enumerate(seen[-2:]):  # before the first step its cost is counted
        batch, _ = clients[number].train.batch(positions[8 * step : 8 * step + 8], worker.device, worker.layout)
        assert torch.equal(x, augment(batch, ALL, draws))


def test_test_images_are_never_changed(tiny: Tiny) -> None:
    aside = "data.val_fraction=0.25"
    (plain, clients, shared), (changing, _, _) = workers(tiny, aside), workers(tiny, aside, ON)
    before = clients[0].train.split.images.copy()
    train_client(changing, clients[0], shared, {}, 1)
    assert np.array_equal(clients[0].train.split.images, before)  # nor is what is kept
    metrics = [evaluate_client(worker, clients[0], shared, {}, 1).metrics for worker in (plain, changing)]
    assert metrics[0] == metrics[1]
    assert "validation/loss" in metrics[0]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("local.augment=flp", ["local.augment", "'flp'", "did you mean 'flip'?"]),
        ("local.augment=flip,color", ["'color'", "did you mean 'colour'?"]),
        ("local.augment=mirror", ["'mirror'", "choose from colour, crop, flip"]),
        ("local.augment=3", ["local.augment must be a list, got 3"]),
        ('local.augment=["flip", 3]', ["local.augment", "3"]),
        ("data.augment=flip", ["[data] has no field 'augment'"]),
    ],
)
def test_a_kind_that_does_not_exist_is_named_in_one_line(
    fedcir: Callable[..., Any], options: list[str], tmp_path: Path, setting: str, named: list[str]
) -> None:
    output = fedcir("run", *options, "--set", setting, "-o", tmp_path / "run")
    assert (output.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert all(name in output.err for name in named)
    assert not (tmp_path / "run").exists()


def test_data_of_ones_own_cannot_be_asked_to_be_augmented() -> None:
    """What a Dataset gives need not be images; it makes its own changes."""
    data = TensorDataset(torch.zeros(4, 5), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(TypeError, match="augment"):
        library.train([(data, data)], encoder=nn.Linear(5, 4), num_classes=2, augment=("flip",))  # type: ignore[call-arg]
