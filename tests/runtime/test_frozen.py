"""A frozen encoder: its features are computed once, and everything else is as if it ran in full."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcir.algorithms import find_algorithm, list_algorithms, make_algorithm, resolve_config
from fedcir.config import Config, ConfigRequest
from fedcir.data.examples import Examples, ImageExamples, Normalisation, Positions
from fedcir.data.features import BATCH, FeatureExamples, encode_batch
from fedcir.data.federation import (
    Client,
    Federation,
    build_federation,
    open_federation,
    partition_dataset,
    pool_clients,
)
from fedcir.errors import InputError
from fedcir.machine import use_threads
from fedcir.models.tensors import count_bytes, is_statistic
from fedcir.runs.reader import load_run
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.session import Session, open_session
from fedcir.types import Tensors

Tiny = Callable[..., Config]
Train = Callable[..., Path]
FREEZE = "model.freeze=true"


class InFull:
    """Examples whose features are computed anew whenever they are asked for: no cache."""

    def __init__(self, images: Examples, network: nn.Module) -> None:
        self.images, self.network = images, network

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        each = [positions[start : start + BATCH] for start in range(0, len(positions), BATCH)]
        return torch.cat([encode_batch(self.network, self.images, some) for some in each]), self.labels()[positions]

    def labels(self) -> Tensor:
        return self.images.labels()


def trained(config: Config, federation: Federation) -> Session:
    algorithm = make_algorithm(config.algorithm)
    session = open_session(config, algorithm, pool_clients(federation) if algorithm.pools else federation)
    with use_threads(1):
        for _ in run_rounds(session, SerialTransport(session.make_trainer(), session.roster.clients)):  # type: ignore[attr-defined]
            pass
    return session


def in_full(config: Config, federation: Federation) -> Federation:
    """The same clients with images and the encoder in the place of cached features."""
    domains, _ = partition_dataset(config)
    network, normalisation = federation.builder.frozen, Normalisation.default(3)
    assert network is not None

    def of(examples: Examples | None) -> Examples | None:
        if examples is None:
            return None
        assert isinstance(examples, FeatureExamples)
        return InFull(ImageExamples(examples.split, normalisation), network)

    def client(each: Client) -> Client:
        return replace(each, train=of(each.train), test=of(each.test))

    assert len(domains) == len(federation.clients)
    return replace(federation, clients=tuple(client(each) for each in federation.clients))


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedcir"])
def test_frozen_features_give_the_same_bits_as_the_frozen_encoder_run_in_full(algorithm: str, tiny: Tiny) -> None:
    config = tiny(algorithm, FREEZE, "model.hidden=5")
    federation = open_federation(config)
    cached, full = trained(config, federation), trained(config, in_full(config, federation))
    assert equal(cached.model, full.model)
    assert [record.accuracy for record in cached.records] == [record.accuracy for record in full.records]


def test_features_of_real_weights_are_those_of_the_encoder_on_every_batch_of_one_shape(data_root: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    options = {"dataset": "arrays", "data_root": data_root, "model": "efficientnet-lite0", "image_size": 32}
    config = ConfigRequest(options=options, assignments=[FREEZE]).resolve()
    domains, shares = partition_dataset(config)
    federation = build_federation(config, domains, shares)
    test, network = federation.clients[0].test, federation.builder.frozen
    assert isinstance(test, FeatureExamples)
    assert network is not None
    images = ImageExamples(test.split, Normalisation((127 / 255,) * 3, (128 / 255,) * 3))
    rows = np.array([5, 0, 3, 9, 1, 7, 2, 8])  # other neighbours than when they were computed
    with use_threads(1), torch.inference_mode():
        x, _ = images.batch(rows, torch.device("cpu"), torch.contiguous_format)
        cached, _ = test.batch(rows, torch.device("cpu"), torch.contiguous_format)
        torch.testing.assert_close(network(x), cached, rtol=0, atol=1e-4)  # ONNX Runtime computed them
    assert federation.card["mean"] == [127 / 255] * 3
    assert federation.card["std"] == [128 / 255] * 3


@pytest.mark.parametrize("algorithm", list_algorithms())
def test_every_method_trains_on_frozen_features(algorithm: str, tiny: Tiny) -> None:
    config = tiny(algorithm, FREEZE, "server.rounds=2", "model.hidden=5")
    federation = open_federation(config)
    if algorithm == "fedbn":
        with pytest.raises(InputError, match="this network has none: use fedavg"):
            trained(config, federation)
        return
    session = trained(config, federation)
    assert session.records[-1].accuracy_mean is not None
    encoder = {name for name in session.model if ".network." in name}
    assert len(encoder) == len(federation.builder.frozen.state_dict())  # type: ignore[union-attr]


def test_only_what_trains_travels_and_the_models_file_holds_the_whole_network(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    config = tiny("fedavg", FREEZE, "model.hidden=5")
    out = train(config, tmp_path / "run")
    record, result = load_run(out).records[-1], load_run(out)
    uploaded = 4 * (5 * 128 + 5 + 3 * 5 + 3)  # the hidden layer and the head, in floats
    assert record.bytes_up == record.bytes_down == 3 * uploaded
    model = result.model()
    federation = open_federation(config)
    test = federation.clients[1].test
    assert isinstance(test, FeatureExamples)
    images = ImageExamples(test.split, Normalisation(result.card["mean"], result.card["std"]))
    rows = np.arange(len(test))
    with torch.inference_mode():
        x, y = images.batch(rows, torch.device("cpu"), torch.contiguous_format)
        on_images = model(x)
        on_features = model(test.batch(rows, torch.device("cpu"), torch.contiguous_format)[0])
    torch.testing.assert_close(on_images, on_features)
    assert record.accuracy is not None
    assert record.accuracy["pen"] == pytest.approx(float((on_images.argmax(-1) == y).float().mean()))
    assert equal(dict(model.state_dict()), result.weights())
    assert count_bytes({"model": result.weights()}) > uploaded


def test_neither_workers_nor_a_resume_change_a_bit(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    whole = train(tiny("fedcir", FREEZE, "run.workers=1"), tmp_path / "whole")
    train(tiny("fedcir", FREEZE, "run.workers=2"), tmp_path / "parts", until=1)
    parts = train(tiny("fedcir", FREEZE, "run.workers=2"), tmp_path / "parts", resume=True)
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()


def test_the_norm_of_fedcirplus_is_left_out_where_the_encoder_is_frozen_or_pretrained() -> None:
    def norm(*assignments: str) -> str:
        return resolve_config(ConfigRequest(options={"algorithm": "fedcirplus"}, assignments=assignments)).model.norm

    assert norm() == "invariant"
    assert norm(FREEZE) == norm("model.batchnorm=frozen") == "batch"
    assert norm("model.name=efficientnet-lite0") == norm("model.weights=resnet18.pth") == "batch"
    assert norm("model.name=efficientnet-lite0", "model.norm=invariant") == "invariant"
    assert norm("model.name=monai.networks.nets:DenseNet121") == "invariant"
    with pytest.raises(InputError, match=r"model\.freeze=true keeps .* model\.norm=invariant"):
        norm(FREEZE, "model.norm=invariant")
    assert find_algorithm("fedcirplus").defaults["model"] == {"norm": "invariant"}


def test_augmentation_of_a_frozen_encoder_is_refused(tiny: Tiny) -> None:
    with pytest.raises(InputError, match=r"local\.augment=flip .* model\.freeze=true"):
        tiny("fedavg", FREEZE, "local.augment=flip")


@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam", "scaffold", "fedcir"])
def test_frozen_batchnorm_statistics_stay_bit_equal_while_weights_train(algorithm: str, tiny: Tiny) -> None:
    config = tiny(algorithm, "model.batchnorm=frozen")
    federation = open_federation(config)
    before = federation.builder.encoder().state_dict()
    after = trained(config, federation).model
    seen = {"statistics": 0, "affine": 0}
    for name, tensor in before.items():
        full = next(item for item in after if item.endswith(name))
        if is_statistic(name):
            seen["statistics"] += 1
            assert torch.equal(after[full], tensor)
        elif name.startswith("norms."):
            seen["affine"] += 1
            assert not torch.equal(after[full], tensor)
    assert seen == {"statistics": 9, "affine": 6}


DROPS = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.ReLU())
"""


def test_a_file_of_ones_own_is_kept_with_the_run_and_its_dropout_is_seeded(
    tiny: Tiny, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(DROPS)
    configs: list[Any] = [tiny("fedavg", f"run.workers={workers}") for workers in (1, 2)]
    own = [replace(each, model=replace(each.model, name="./mine.py:make", width=None)) for each in configs]
    one, two = (train(config, tmp_path / f"run-{number}") for number, config in enumerate(own))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "mine.py").read_text() == DROPS
    longer = replace(own[0], server=replace(own[0].server, rounds=4))
    Path("mine.py").write_text(DROPS.replace("0.5", "0.1"))
    with pytest.raises(InputError, match=r"mine\.py has changed since .*run-0/mine\.py"):
        train(longer, one, resume=True)
    Path("mine.py").unlink()
    assert load_run(one).card["model"]["name"] == "mine.py:make"
    assert load_run(one, trust_code=True).model()(torch.zeros(2, 3, 8, 8)).shape == (2, 3)
