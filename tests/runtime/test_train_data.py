"""What fedcir.train takes as clients and as encoder, and how it refuses the rest."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from toy_clients import TINY, Pairs, clients, images, on_vectors, same, vectors

import fedcir
from fedcir import train


def test_names_of_clients_are_those_of_records_summary_and_manifest(tmp_path: Path) -> None:
    named = dict(zip(("photo", "sketch", "art"), clients(vectors), strict=True))
    result = fedcir.train(named, encoder=on_vectors(), out=tmp_path / "run", **TINY)
    assert list(result.records[-1].accuracy or {}) == list(named)
    assert list(result.summary["final"]["accuracy"]) == list(named)
    assert [client["domain"] for client in fedcir.RunFolder(tmp_path / "run").manifest()["clients"]] == list(named)
    assert same(result.model, fedcir.train(clients(vectors), encoder=on_vectors(), **TINY).model)


def test_clients_may_come_one_by_one() -> None:
    result = fedcir.train((pair for pair in clients(vectors)), encoder=on_vectors(), **TINY)
    assert list(result.records[-1].accuracy or {}) == ["client-0", "client-1", "client-2"]


@pytest.mark.parametrize("inputs", [torch.float64, torch.float16, torch.bool], ids=str)
def test_inputs_of_another_precision_are_made_single(inputs: torch.dtype) -> None:
    x, y = vectors(24, 0).tensors
    given, single = (TensorDataset(item, y) for item in (x.round().to(inputs), x.round().to(inputs).float()))
    models = [fedcir.train([(item, item)], encoder=on_vectors(), **TINY).model for item in (given, single)]
    assert same(*models)


def test_whole_numbers_reach_an_embedding_as_they_are() -> None:
    words = TensorDataset(torch.arange(48).view(12, 4) % 9, torch.arange(12) % 3)
    encoder = nn.Sequential(nn.Embedding(9, 4), nn.Flatten())
    assert fedcir.train([(words, words)], encoder=encoder, **TINY).summary["final"] is not None


LABELS: dict[str, Callable[[torch.Tensor], Any]] = {
    "int32": lambda y: y.int(),
    "bytes": lambda y: y.byte(),
    "floats": lambda y: y.double(),
    "columns": lambda y: y[:, None],
    "numbers": lambda y: y.tolist(),
    "numpy": lambda y: list(y.numpy().astype(np.int16)),
}


@pytest.mark.parametrize("change", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("whole", [True, False], ids=["of tensors", "of items"])
def test_labels_may_be_of_any_number_type(whole: bool, change: Callable[[torch.Tensor], Any]) -> None:
    x, y = vectors(24, 0).tensors
    given = TensorDataset(x, torch.as_tensor(change(y))) if whole else list(zip(x, change(y), strict=True))
    models = [fedcir.train([(item, item)], encoder=on_vectors(), **TINY).model for item in (given, vectors(24, 0))]
    assert same(*models)


X, Y = vectors(12, 0).tensors


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Y + 1, "gives the label 3: with num_classes=3, labels are whole numbers from 0 to 2"),
        (Y - 1, "gives the label -1"),
        (Y + 0.5, "gives the label 0.5"),
        (Y * torch.nan, "gives the label nan"),
        (torch.eye(3)[Y], r"gives labels of the shape \[3\]: give one class number a sample; .* labels.argmax\(-1\)"),
        (torch.ones(len(Y), 3), r"gives labels of the shape \[3\]: .* need another task, such as multilabel"),
    ],
    ids=["above", "below", "a fraction", "no number", "one-hot", "multi-label"],
)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("whole", [True, False], ids=["of tensors", "of items"])
def test_a_label_that_is_no_class_is_named_with_its_client(
    whole: bool, workers: int, labels: torch.Tensor, message: str
) -> None:
    wrong = TensorDataset(X, labels) if whole else list(zip(X, labels, strict=True))
    sites = {"here": (vectors(12, 0), vectors(12, 0)), "there": (wrong, vectors(12, 0))}
    with pytest.raises(fedcir.InputError, match=f"the train Dataset of 'there' {message}"):
        fedcir.train(sites, encoder=on_vectors(), **{**TINY, "workers": workers})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_without_a_test_set_trains_and_is_not_tested(workers: int) -> None:
    sites = {"here": (vectors(24, 0), None), "there": (vectors(24, 1), vectors(12, 1))}
    result = fedcir.train(sites, encoder=on_vectors(), **{**TINY, "workers": workers})
    tested = {name: (train, vectors(12, 1)) for name, (train, _) in sites.items()}
    assert list(result.records[-1].accuracy or {}) == ["there"]
    assert same(result.model, fedcir.train(tested, encoder=on_vectors(), **TINY).model)


@pytest.mark.parametrize("workers", [1, 2])
def test_where_nobody_tests_accuracies_are_none(tmp_path: Path, workers: int, fedcir: Callable[..., Any]) -> None:
    sites = [(vectors(24, 0), None), (vectors(24, 1), None)]
    result = train(sites, encoder=on_vectors(), out=tmp_path / "run", **{**TINY, "workers": workers})
    last = result.records[-1]
    assert (last.accuracy, last.accuracy_mean, last.accuracy_weighted, last.accuracy_worst) == (None,) * 4
    assert result.summary["final"] is result.summary["best"] is None
    output = fedcir("report", tmp_path / "run")
    assert output.code == 2
    assert "run has no score: no client had test examples" in output.err


@pytest.mark.parametrize("algorithm", ["fedavg", "centralized"])
def test_a_client_without_a_train_set_only_tests(algorithm: str) -> None:
    seen = (vectors(24, 0), vectors(12, 0))
    apart = fedcir.train(
        {"new": (None, vectors(12, 1)), "old": seen}, encoder=on_vectors(), algorithm=algorithm, **TINY
    )
    assert list(apart.records[-1].accuracy or {}) == ["new", "old"]
    assert (
        apart.records[-1].bytes_up
        == fedcir.train([seen], encoder=on_vectors(), algorithm=algorithm, **TINY).records[-1].bytes_up
    )


class Records(Dataset):
    """Items as Hugging Face gives them."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"image": X[i], "label": 0}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield X[0], 0


PAIR = (vectors(12, 0), vectors(12, 0))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({}, "clients must hold at least one"),
        (vectors(6, 0), "must be a list or dict of .* pairs, got TensorDataset"),
        (PAIR, r"client 'client-0' is of type TensorDataset: give \(train, test\), or \(train, None\)"),
        ([PAIR, (*PAIR, None)], "client 'client-1' is of type tuple of 3: give"),
        ({3: PAIR}, "clients must be named by strings, got 3"),
        ({"a": PAIR, "b": (None, None)}, "client 'b' has neither a train nor a test Dataset"),
        ([(None, vectors(6, 0))], "at least one .* with a train Dataset"),
        (
            [(DataLoader(PAIR[0]), None)],
            "the train Dataset of 'client-0' is a DataLoader: give the Dataset that it loads",
        ),
        ([(PAIR[0], Stream())], "the test Dataset of 'client-0' is of type Stream: give one with a length"),
        ([((item for item in PAIR[0]), None)], "is of type generator: give one with a length and an index"),
        ([((X, Y), None)], r"is of type tuple: give .*TensorDataset\(inputs, labels\)"),
        ([(X.numpy(), None)], r"is of type ndarray: give .*TensorDataset\(inputs, labels\)"),
        ([({"x": X, "y": Y}, None)], "is of type dict: give one with a length"),
        ([(Records(), None)], r"gives items of type dict \(image, label\): it must give \(input, label\) pairs"),
        ([(TensorDataset(X), None)], r"gives items of type tuple: it must give \(input, label\) pairs"),
        ([([(X[0], "cat")], None)], "gives labels of type str: give tensors, arrays or numbers"),
        ([([("a.png", 0)], None)], "gives inputs of type str"),
        ([([(X[i, : 4 + i % 2], 0) for i in range(12)], None)], r"gives inputs of the shapes \[[45]\] and \[[45]\]"),
    ],
)
def test_what_is_no_federation_is_told_in_one_line_with_the_fix(pairs: Any, message: str) -> None:
    with pytest.raises(fedcir.InputError, match=message) as refused:
        fedcir.train(pairs, encoder=nn.Linear(4 if "shapes" in message else 5, 3), **TINY)
    assert "\n" not in str(refused.value)


NOTHING = TensorDataset(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "clients must hold at least one"),
        ([(vectors(6, 0), vectors(6, 0)), (NOTHING, vectors(6, 1))], "the train Dataset of 'client-1' is empty"),
        ([(vectors(6, 0), NOTHING)], "the test Dataset of 'client-0' is empty"),
    ],
    ids=["no clients", "nothing to train on", "nothing to test on"],
)
def test_a_client_without_data_is_named(pairs: Pairs, message: str) -> None:
    with pytest.raises(fedcir.InputError, match=message):
        fedcir.train(pairs, encoder=on_vectors(), **TINY)


class Twofold(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (nn.Identity(), r"got the shape \[2, 2, 6, 6\] on a batch of the train Dataset of 'client-0'.*nn.Flatten"),
        (nn.Flatten(0), r"must map a batch to \(batch, features\), got the shape \[144\]"),
        (Twofold(), "must map a batch .*, got tuple on a batch"),
        (
            nn.Linear(5, 3),
            r"encoder fails on a batch of the train Dataset of 'client-0', float32\[2, 2, 6, 6\]: Runtime",
        ),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "encoder has lazy layers.*: call it on a batch first"),
        (nn.Conv2d(2, 4, 3, device="meta"), "encoder cannot be copied to the CPU: .*meta"),
        (nn.Flatten, "encoder must be an nn.Module, got <class 'torch.nn.modules.flatten.Flatten'>"),
        (torch.flatten, "encoder must be an nn.Module, got <built-in method flatten"),
    ],
    ids=["images", "one row", "a tuple", "too wide", "lazy", "without weights", "a class", "a function"],
)
def test_an_encoder_that_does_not_give_features_is_told_in_one_line(encoder: Any, message: str) -> None:
    with pytest.raises(fedcir.InputError, match=message) as refused:
        fedcir.train(clients(images), encoder=encoder, **TINY)
    assert "\n" not in str(refused.value)


def test_whole_numbers_that_the_encoder_cannot_take_are_told_with_the_fix() -> None:
    numbers = TensorDataset(X.long(), Y)
    with pytest.raises(
        fedcir.InputError, match=r"int64\[2, 5\]: .* \(whole numbers are passed on .*: give floats, or bytes"
    ):
        fedcir.train([(numbers, numbers)], encoder=on_vectors(), **TINY)
    with pytest.raises(fedcir.InputError, match=r"encoder must give floats, got torch\.int64"):
        fedcir.train([(numbers, numbers)], encoder=nn.Identity(), **TINY)


def test_an_encoder_in_double_precision_is_trained_in_single() -> None:
    models = [
        fedcir.train(clients(vectors), encoder=item, **TINY).model for item in (on_vectors().double(), on_vectors())
    ]
    assert same(*models)


def sized(size: int) -> tuple[TensorDataset, TensorDataset]:
    site = TensorDataset(torch.randn(12, 2, size, size), torch.arange(12) % 3)
    return site, site


def test_clients_may_differ_in_the_size_of_images_where_the_encoder_takes_all() -> None:
    pooling = nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    sites = {"small": sized(6), "large": sized(8)}
    assert fedcir.train(sites, encoder=pooling, **TINY).summary["rounds"] == 3
    with pytest.raises(
        fedcir.InputError, match=r"encoder gives 128 features on the train Dataset of 'large'.* 72 on others"
    ):
        fedcir.train(sites, encoder=nn.Flatten(), **TINY)
    with pytest.raises(
        fedcir.InputError, match=r"shapes \[2, \d, \d\] and \[2, \d, \d\], which cannot be in one batch"
    ):
        fedcir.train(sites, encoder=pooling, algorithm="centralized", **TINY)
