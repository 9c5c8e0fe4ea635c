"""fedcir.train: any Datasets, any encoder."""

import ast
import copy
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedcir
from fedcir import train
from fedcir.algorithms import algorithm_class, names

SOURCE = Path(fedcir.__file__).parents[1]
Pairs = list[tuple[Dataset, Dataset]]

EXPORTED = [
    cls(hidden=8) if "hidden" in {f.name for f in fields(cls)} else cls() for cls in map(algorithm_class, names())
]
FOR_ALL = [algorithm for algorithm in EXPORTED if algorithm.one_model]
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
@pytest.mark.parametrize("algorithm", FOR_ALL, ids=lambda algorithm: type(algorithm).__name__)
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
    final = result.summary["final"]
    assert final["accuracy"].keys() == {"client-0", "client-1", "client-2"}
    for site in range(3):
        x, y = make(12, site).tensors
        logits = result.model_of(f"client-{site}")(x)
        assert logits.shape == (12, 3)
        assert final["accuracy"][f"client-{site}"] == float((logits.argmax(-1) == y).double().mean())


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


def test_the_recommended_method_is_the_default() -> None:
    assert fedcir.train(clients(vectors), encoder=on_vectors(), **TINY).summary["algorithm"] == "fedcirplus"


def test_fedcir_takes_a_latent_width() -> None:
    result = fedcir.train(clients(vectors), encoder=on_vectors(), algorithm="fedcir", latent=7, **TINY)
    assert result.model.head.weight.shape == (3, 7)


@pytest.mark.parametrize("algorithm", FOR_ALL, ids=lambda algorithm: type(algorithm).__name__)
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


def test_a_run_that_on_round_stops_keeps_its_model_and_summary_and_can_be_continued(tmp_path: Path) -> None:
    def run(resume: bool, **more: Any) -> Any:
        return fedcir.train(clients(vectors), encoder=on_vectors(), out=tmp_path / "run", resume=resume, **TINY, **more)

    stopped = run(False, on_round=lambda record: record.round < 2)
    saved = fedcir.load_run(tmp_path / "run")
    assert saved.summary["rounds"] == stopped.summary["rounds"] == saved.final["round"] == 2
    assert same(saved.model(encoder=on_vectors()), stopped.model)
    assert same(run(True).model, fedcir.train(clients(vectors), encoder=on_vectors(), **TINY).model)


def test_a_folder_with_a_run_is_refused_without_resume(tmp_path: Path) -> None:
    fedcir.train(clients(vectors), encoder=on_vectors(), out=tmp_path / "run", **TINY)
    with pytest.raises(fedcir.InputError, match="already holds a run"):
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


@pytest.mark.parametrize(
    "algorithm",
    ["fedavg", fedcir.FedAvg, Path("fedavg.py"), "./fedavg.py"],
    ids=["its name", "its class", "a path", "a file"],
)
def test_a_method_may_be_given_by_its_name_its_class_or_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: object
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fedavg.py").write_bytes(Path(sys.modules[fedcir.FedAvg.__module__].__file__ or "").read_bytes())
    asked = fedcir.train(clients(vectors), encoder=on_vectors(), algorithm=algorithm, **TINY)  # type: ignore[arg-type]
    plain = fedcir.train(clients(vectors), encoder=on_vectors(), algorithm=fedcir.FedAvg(), **TINY)
    assert same(asked.model, plain.model)
    assert Path(asked.summary["algorithm"]).stem == "fedavg"


@dataclass(frozen=True)
class Unsettled(fedcir.Algorithm):
    mu: float


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("FedAvg", "no algorithm 'FedAvg'; did you mean 'fedavg'"),
        ("gone.py", "no algorithm file gone.py"),
        (3, "algorithm must be an algorithm such as .*, its name or its file, got 3"),
        (dict, "its name or its file, got <class 'dict'>"),
        (None, "its name or its file, got None"),
        (Unsettled, "give every field of class Unsettled a default; mu has none"),
    ],
)
def test_what_is_no_method_is_refused(algorithm: object, said: str) -> None:
    with pytest.raises(fedcir.InputError, match=said):
        fedcir.train(clients(vectors), encoder=on_vectors(), algorithm=algorithm, **TINY)  # type: ignore[arg-type]


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
    given, single = (TensorDataset(each, y) for each in (x.round().to(inputs), x.round().to(inputs).float()))
    models = [fedcir.train([(each, each)], encoder=on_vectors(), **TINY).model for each in (given, single)]
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
    models = [fedcir.train([(each, each)], encoder=on_vectors(), **TINY).model for each in (given, vectors(24, 0))]
    assert same(*models)


X, Y = vectors(12, 0).tensors


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (Y + 1, "gives the label 3: with num_classes=3, labels are whole numbers from 0 to 2"),
        (Y - 1, "gives the label -1"),
        (Y + 0.5, "gives the label 0.5"),
        (Y * torch.nan, "gives the label nan"),
        (torch.eye(3)[Y], r"gives labels of the shape \[3\]: give one class number a sample; .* labels.argmax\(-1\)"),
        (torch.ones(len(Y), 3), r"gives labels of the shape \[3\]: .* \(multi-label, .*\) are not supported"),
    ],
    ids=["above", "below", "a fraction", "no number", "one-hot", "multi-label"],
)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("whole", [True, False], ids=["of tensors", "of items"])
def test_a_label_that_is_no_class_is_named_with_its_client(
    whole: bool, workers: int, labels: torch.Tensor, said: str
) -> None:
    wrong = TensorDataset(X, labels) if whole else list(zip(X, labels, strict=True))
    sites = {"here": (vectors(12, 0), vectors(12, 0)), "there": (wrong, vectors(12, 0))}
    with pytest.raises(fedcir.InputError, match=f"the train Dataset of 'there' {said}"):
        fedcir.train(sites, encoder=on_vectors(), workers=workers, **TINY)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_without_a_test_set_trains_and_is_not_tested(workers: int) -> None:
    sites = {"here": (vectors(24, 0), None), "there": (vectors(24, 1), vectors(12, 1))}
    result = fedcir.train(sites, encoder=on_vectors(), workers=workers, **TINY)
    tested = {name: (train, vectors(12, 1)) for name, (train, _) in sites.items()}
    assert list(result.records[-1].accuracy or {}) == ["there"]
    assert same(result.model, fedcir.train(tested, encoder=on_vectors(), **TINY).model)


@pytest.mark.parametrize("workers", [1, 2])
def test_where_nobody_tests_accuracies_are_none(tmp_path: Path, workers: int, fedcir: Callable[..., Any]) -> None:
    sites = [(vectors(24, 0), None), (vectors(24, 1), None)]
    result = train(sites, encoder=on_vectors(), workers=workers, out=tmp_path / "run", **TINY)
    last = result.records[-1]
    assert (last.accuracy, last.accuracy_mean, last.accuracy_weighted, last.accuracy_worst) == (None,) * 4
    assert result.summary["final"] is result.summary["best"] is None
    said = fedcir("report", tmp_path / "run")
    assert said.code == 2
    assert "run was never tested, because no client had a test Dataset" in said.err


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
    ("pairs", "said"),
    [
        ({}, "clients must hold at least one"),
        (vectors(6, 0), "must be a list of .* pairs, or a dict of them by name, got TensorDataset"),
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
        ([((X, Y), None)], r"is of type tuple: give TensorDataset\(inputs, labels\)"),
        ([(X.numpy(), None)], r"is of type ndarray: give TensorDataset\(inputs, labels\)"),
        ([({"x": X, "y": Y}, None)], "is of type dict: give one with a length"),
        ([(Records(), None)], r"gives items of type dict \(image, label\): it must give \(input, label\) pairs"),
        ([(TensorDataset(X), None)], r"gives items of type tuple: it must give \(input, label\) pairs"),
        ([([(X[0], "cat")], None)], "gives labels of type str: give tensors, arrays or numbers"),
        ([([("a.png", 0)], None)], "gives inputs of type str"),
        ([([(X[i, : 4 + i % 2], 0) for i in range(12)], None)], r"gives inputs of the shapes \[[45]\] and \[[45]\]"),
    ],
)
def test_what_is_no_federation_is_told_in_one_line_with_the_fix(pairs: Any, said: str) -> None:
    with pytest.raises(fedcir.InputError, match=said) as refused:
        fedcir.train(pairs, encoder=nn.Linear(4 if "shapes" in said else 5, 3), **TINY)
    assert "\n" not in str(refused.value)


NOTHING = TensorDataset(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([], "clients must hold at least one"),
        ([(vectors(6, 0), vectors(6, 0)), (NOTHING, vectors(6, 1))], "the train Dataset of 'client-1' is empty"),
        ([(vectors(6, 0), NOTHING)], "the test Dataset of 'client-0' is empty"),
    ],
    ids=["no clients", "nothing to train on", "nothing to test on"],
)
def test_a_client_without_data_is_named(pairs: Pairs, said: str) -> None:
    with pytest.raises(fedcir.InputError, match=said):
        fedcir.train(pairs, encoder=on_vectors(), **TINY)


class Twofold(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("encoder", "said"),
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
def test_an_encoder_that_does_not_give_features_is_told_in_one_line(encoder: Any, said: str) -> None:
    with pytest.raises(fedcir.InputError, match=said) as refused:
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
        fedcir.train(clients(vectors), encoder=each, **TINY).model for each in (on_vectors().double(), on_vectors())
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 0}, "server.rounds must be at least 1, got 0"),
        ({"rounds": 1.5}, "server.rounds must be a whole number, got 1.5"),
        ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
        ({"num_classes": "3"}, "num_classes must be a whole number, got '3'"),
        ({"latent": 0}, "model.latent must be at least 1, got 0"),
        ({"layout": "nchw"}, "run.layout cannot be 'nchw'"),
        ({"lr": float("nan")}, "local.lr must be a number above 0, got nan"),
        ({"active": 4}, "server.active is 4, but there are 3 clients"),
        ({"set": {"local.momentun": 0.5}}, "did you mean 'momentum'"),
        ({"set": ["model.norm=group"]}, r"set takes no settings of \[model\] here"),
        ({"device": "cuda:99" if not torch.cuda.is_available() else "tpu"}, "is not available here"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(fedcir.InputError, match=said):
        fedcir.train(clients(vectors), encoder=on_vectors(), **{**TINY, **changes})


def test_any_setting_of_training_can_be_set() -> None:
    def weights(**given: Any) -> dict[str, torch.Tensor]:
        made = fedcir.train(clients(vectors), encoder=on_vectors(), algorithm="fedavg", **TINY, **given)
        return made.model.state_dict()

    torch.testing.assert_close(weights(set={"local.prior": "client"}), weights(prior="client"), rtol=0, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(weights(set=["local.schedule=cosine"]), weights())


def test_the_number_of_classes_may_be_counted_by_torch_or_numpy() -> None:
    for count in (Y.max() + 1, np.int64(3)):
        assert fedcir.train([PAIR], encoder=on_vectors(), **{**TINY, "num_classes": count}).summary["rounds"] == 3


def in_a_process_of_its_own(code: str, source: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout


def test_dir_lists_every_method_and_imports_no_torch() -> None:
    code = "import sys, fedcir; print(*dir(fedcir)); assert 'torch' not in sys.modules"
    listed = in_a_process_of_its_own(code, SOURCE).split()
    assert {type(algorithm).__name__ for algorithm in EXPORTED} <= set(listed)
    assert listed == sorted(fedcir.__all__)


def test_a_new_file_in_algorithms_is_exported_by_itself(tmp_path: Path) -> None:
    shutil.copytree(SOURCE / "fedcir", tmp_path / "fedcir", ignore=shutil.ignore_patterns("__pycache__"))
    method = 'from fedcir.algorithms.algorithm import Algorithm\n\n\nclass FedNew(Algorithm):\n    """New."""\n'
    (tmp_path / "fedcir" / "algorithms" / "fednew.py").write_text(method, encoding="utf-8")
    code = "import fedcir; assert 'FedNew' in dir(fedcir); from fedcir import *; print(FedNew.__module__)"
    assert in_a_process_of_its_own(code, tmp_path) == "fedcir.algorithms.fednew\n"


def test_what_editors_are_told_is_what_is_exported() -> None:
    tree = ast.parse((SOURCE / "fedcir" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {each.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for each in node.names}
    assert {name: getattr(importlib.import_module(str(module)), str(name)) for name, module in told.items()} == {
        name: getattr(fedcir, str(name)) for name in told
    }
    assert {type(algorithm).__name__ for algorithm in EXPORTED} <= told.keys() <= set(fedcir.__all__)
