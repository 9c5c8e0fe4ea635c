"""fedcir.train: any Datasets, any encoder."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import fedcir

Pairs = list[tuple[Dataset, Dataset]]

EXPORTED = [fedcir.FedAvg(), fedcir.FedCiR(hidden=8), fedcir.FedReg(hidden=8), fedcir.FedAlign(hidden=8)]
TINY = {"num_classes": 3, "rounds": 3, "local_steps": 3, "batch_size": 8}


def vectors(count: int, site: int) -> TensorDataset:
    """Three classes, each a corner of its own, on a background that differs from site to site."""
    labels = torch.arange(count) % 3
    noise = 0.3 * torch.randn(count, 5, generator=torch.Generator().manual_seed(100 * site + count))
    return TensorDataset(2 * torch.eye(5)[labels] + noise + 0.2 * site, labels)


def images(count: int, site: int) -> TensorDataset:
    labels = torch.arange(count) % 3
    noise = 0.3 * torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(100 * site + count))
    bands = torch.eye(6)[2 * labels].view(count, 1, 6, 1)
    return TensorDataset(noise + 2 * bands, labels)


def clients(make: Callable[[int, int], TensorDataset]) -> Pairs:
    return [(make(24 - site, site), make(12, site)) for site in range(3)]


def on_vectors() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU())


def on_images() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())


CASES = [(vectors, on_vectors), (images, on_images)]


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("make", "encoder"), CASES, ids=["vectors", "images"])
@pytest.mark.parametrize("algorithm", EXPORTED, ids=lambda algorithm: type(algorithm).__name__)
def test_every_algorithm_trains_a_model_that_predicts_and_leaves_the_encoder_as_it_was(
    make: Callable[[int, int], TensorDataset], encoder: Callable[[], nn.Module], algorithm: fedcir.Algorithm
) -> None:
    own = encoder()
    before = copy.deepcopy(own)
    seen: list[int] = []
    result = fedcir.train(
        clients(make), encoder=own, algorithm=algorithm, on_round=lambda record: seen.append(record.round), **TINY
    )
    assert same(own, before)
    assert own.training
    assert seen == [record.round for record in result.records] == [1, 2, 3]
    assert not result.model.training
    x, y = make(12, 0).tensors
    logits = result.model(x)
    assert logits.shape == (12, 3)
    final = result.summary["final"]
    assert final["accuracy"].keys() == {"client-0", "client-1", "client-2"}
    assert final["accuracy"]["client-0"] == float((logits.argmax(-1) == y).double().mean())


def test_a_part_of_the_encoder_that_was_in_evaluation_mode_stays_so() -> None:
    own = on_vectors()
    own[1].eval()
    fedcir.train(clients(vectors), encoder=own, algorithm=fedcir.FedAvg(), **TINY)
    assert [module.training for module in own] == [True, False, True]


def test_training_starts_from_the_weights_of_the_encoder() -> None:
    own = on_vectors()
    result = fedcir.train(clients(vectors), encoder=own, algorithm=fedcir.FedAvg(), lr=1e-12, **TINY)
    assert torch.allclose(result.model.encoder[0].weight, own[0].weight, atol=1e-6)


def test_the_model_gets_better() -> None:
    settings = {**TINY, "rounds": 15, "lr": 0.05, "eval_every": 15}
    result = fedcir.train(clients(vectors), encoder=on_vectors(), algorithm=fedcir.FedCiR(hidden=8), **settings)
    assert result.summary["final"]["accuracy_worst"] > 0.9


def test_fedcir_is_the_default_and_takes_a_latent_width() -> None:
    result = fedcir.train(clients(vectors), encoder=on_vectors(), latent=7, **TINY)
    assert result.summary["algorithm"] == "fedcir"
    assert result.model.head.weight.shape == (3, 7)


@pytest.mark.parametrize("algorithm", EXPORTED, ids=lambda algorithm: type(algorithm).__name__)
def test_the_same_seed_gives_the_same_bits_whatever_was_drawn_before(algorithm: fedcir.Algorithm) -> None:
    models = []
    for drawn in (1, 100):
        torch.randn(drawn)
        models.append(fedcir.train(clients(vectors), encoder=on_vectors(), algorithm=algorithm, seed=4, **TINY).model)
    assert same(*models)


def test_another_seed_gives_another_model() -> None:
    one, other = (fedcir.train(clients(vectors), encoder=on_vectors(), seed=s, **TINY).model for s in (0, 1))
    assert not same(one, other)


def test_training_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    fedcir.train(clients(vectors), encoder=on_vectors(), **TINY)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_run_in_a_folder_is_continued_there(tmp_path: Path) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"

    class Stop(Exception):
        pass

    def stop(record: fedcir.RoundRecord) -> None:
        if record.round == 2:
            raise Stop

    with pytest.raises(Stop):
        fedcir.train(clients(vectors), encoder=on_vectors(), out=out, on_round=stop, **TINY)
    assert not fedcir.RunFolder(out).finished
    continued = fedcir.train(clients(vectors), encoder=on_vectors(), out=str(out), resume=True, **TINY)
    reference = fedcir.train(clients(vectors), encoder=on_vectors(), out=whole, **TINY)
    assert same(continued.model, reference.model)
    assert len(continued.records) == 3
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    finished = fedcir.train(clients(vectors), encoder=on_vectors(), out=out, resume=True, **TINY)
    assert same(finished.model, reference.model)
    assert finished.summary == continued.summary == fedcir.RunFolder(out).summary()


def test_a_folder_with_a_run_is_refused_without_resume(tmp_path: Path) -> None:
    fedcir.train(clients(vectors), encoder=on_vectors(), out=tmp_path / "run", **TINY)
    with pytest.raises(fedcir.InputError, match="holds a run already"):
        fedcir.train(clients(vectors), encoder=on_vectors(), out=tmp_path / "run", **TINY)


def test_an_own_algorithm_trains() -> None:
    class Twice(fedcir.FedAvg):
        def local_loss(self, modules, x, y, ctx):  # type: ignore[no-untyped-def]
            losses = super().local_loss(modules, x, y, ctx)
            return fedcir.Losses(2 * losses.total, losses.terms)

    result = fedcir.train(clients(vectors), encoder=on_vectors(), algorithm=Twice(), **TINY)
    assert result.records[0].losses["total"] == pytest.approx(2 * result.records[0].losses["ce"])


def test_a_dataset_that_is_not_of_tensors_trains() -> None:
    class Lists(Dataset):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, i: int) -> tuple[list[float], int]:
            return [float(i % 3 == j) for j in range(5)], i % 3

    result = fedcir.train([(Lists(), Lists())], encoder=on_vectors(), algorithm=fedcir.FedAvg(), **TINY)
    assert result.summary["rounds"] == 3


NOTHING = TensorDataset(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([], "clients must hold at least one"),
        ([(vectors(6, 0), vectors(6, 0)), (NOTHING, vectors(6, 1))], "the train Dataset of client 1 is empty"),
        ([(vectors(6, 0), NOTHING)], "the test Dataset of client 0 is empty"),
    ],
    ids=["no clients", "nothing to train on", "nothing to test on"],
)
def test_a_client_without_data_is_named(pairs: Pairs, said: str) -> None:
    with pytest.raises(fedcir.InputError, match=said):
        fedcir.train(pairs, encoder=on_vectors(), **TINY)


def test_an_encoder_that_does_not_give_features_is_refused_by_the_shape_it_gives() -> None:
    with pytest.raises(
        fedcir.InputError, match=r"must map a batch to \(batch, features\), got the shape \[2, 4, 6, 6\]"
    ):
        fedcir.train(clients(images), encoder=nn.Conv2d(2, 4, 3, padding=1), **TINY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 0}, "server.rounds must be at least 1, got 0"),
        ({"lr": float("nan")}, "local.lr must be a number above 0, got nan"),
        ({"active": 4}, "server.active is 4, but there are 3 clients"),
        ({"device": "cuda:99" if not torch.cuda.is_available() else "tpu"}, "is not usable here"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, float], said: str) -> None:
    with pytest.raises(fedcir.InputError, match=said):
        fedcir.train(clients(vectors), encoder=on_vectors(), **{**TINY, **changes})


def test_a_label_beyond_num_classes_is_named() -> None:
    with pytest.raises(fedcir.InputError, match="label 2"):
        fedcir.train(clients(vectors), encoder=on_vectors(), **{**TINY, "num_classes": 2})
