"""fedcir.train: any Datasets, any encoder."""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from toy_clients import TINY, clients, images, on_images, on_vectors, same, vectors

import fedcir
from fedcir.algorithms import find_algorithm, list_algorithms
from kinds import KINDS

EXPORTED = [
    cls(hidden=8) if "hidden" in {f.name for f in fields(cls)} else cls()
    for cls in map(find_algorithm, list_algorithms())
]
FOR_ALL = [algorithm for algorithm in EXPORTED if algorithm.one_model]
OF_EACH_KIND = [algorithm for algorithm in FOR_ALL if type(algorithm).__name__.lower() in KINDS]
OF_EACH_NETWORK = [algorithm for algorithm in FOR_ALL if type(algorithm).__name__ in ("FedAvg", "FedCiR", "FedSR")]
CASES = [(vectors, on_vectors), (images, on_images)]


@pytest.mark.parametrize(("make", "encoder"), CASES, ids=["vectors", "images"])
@pytest.mark.parametrize("algorithm", OF_EACH_NETWORK, ids=lambda algorithm: type(algorithm).__name__)
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


@pytest.mark.parametrize("algorithm", OF_EACH_KIND, ids=lambda algorithm: type(algorithm).__name__)
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
    assert fedcir.report(tmp_path / "run", out=tmp_path / "run.html").path.stat().st_size > 0
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
    settings = fedcir.train(clients(vectors), encoder=on_vectors(), algorithm=algorithm, **TINY)  # type: ignore[arg-type]
    plain = fedcir.train(clients(vectors), encoder=on_vectors(), algorithm=fedcir.FedAvg(), **TINY)
    assert same(settings.model, plain.model)
    assert Path(settings.summary["algorithm"]).stem == "fedavg"


@dataclass(frozen=True)
class Unsettled(fedcir.Algorithm):
    mu: float


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("FedAvg", "no algorithm 'FedAvg'; did you mean 'fedavg'"),
        ("gone.py", "no algorithm file gone.py"),
        (3, "algorithm must be a method such as .*, its name or its file, got 3"),
        (dict, "its name or its file, got <class 'dict'>"),
        (None, "its name or its file, got None"),
        (Unsettled, "give every field of class Unsettled a default; mu has none"),
    ],
)
def test_what_is_no_method_is_refused(algorithm: object, message: str) -> None:
    with pytest.raises(fedcir.InputError, match=message):
        fedcir.train(clients(vectors), encoder=on_vectors(), algorithm=algorithm, **TINY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_a_setting_out_of_range_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(fedcir.InputError, match=message):
        fedcir.train(clients(vectors), encoder=on_vectors(), **{**TINY, **changes})


def test_any_setting_of_training_can_be_set() -> None:
    def weights(**given: Any) -> dict[str, torch.Tensor]:
        made = fedcir.train(clients(vectors), encoder=on_vectors(), algorithm="fedavg", **TINY, **given)
        return made.model.state_dict()

    torch.testing.assert_close(weights(set={"local.prior": "client"}), weights(prior="client"), rtol=0, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(weights(set=["local.schedule=cosine"]), weights())


def test_the_number_of_classes_may_be_counted_by_torch_or_numpy() -> None:
    dataset = vectors(12, 0)
    for count in (dataset.tensors[1].max() + 1, np.int64(3)):
        assert (
            fedcir.train([(dataset, dataset)], encoder=on_vectors(), **{**TINY, "num_classes": count}).summary["rounds"]
            == 3
        )
