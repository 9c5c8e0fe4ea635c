"""The guarantees of algorithms, aggregation rules, datasets and models, as checks that anyone can run on their own.

From the command line: `fedcir algorithms ./mine.py --check`. In a test: `check_algorithm(Mine())`.
"""

import inspect
import json
import math
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Assignments, Config, DataConfig, LocalConfig, ModelConfig, ServerConfig
from fedcir.data.federation import Federation, pool_clients
from fedcir.data.opening import open_dataset
from fedcir.data.torch_datasets import federation_from_datasets
from fedcir.errors import InputError
from fedcir.machine import use_threads
from fedcir.models.builder import make_image_builder
from fedcir.models.networks import CNN
from fedcir.models.tensors import clone, find_mismatch, find_non_finite
from fedcir.runtime.resolution import config_from_keywords, get_hyper_parameters
from fedcir.runtime.rounds import SerialTransport, run_rounds, step_server
from fedcir.runtime.session import Session, open_session
from fedcir.runtime.simulation import open_rounds
from fedcir.tasks.multilabel import MultiLabel
from fedcir.tasks.regression import Regression
from fedcir.tasks.segmentation import Segmentation
from fedcir.tasks.survival import Survival
from fedcir.tasks.task import Task
from fedcir.text import describe_error
from fedcir.types import Aggregator, ClientReply, Groups, ServerState, Tensors

CLASSES = 3
SIZES = (20, 12, 1, 9)  # a client with one sample among them
TASKS = (MultiLabel(("a", "b", "c")), Regression(("a",)), Survival(("event", "time")), Segmentation(("a", "b")))


class Failure(AssertionError):
    """The algorithm breaks a guarantee."""


@dataclass(frozen=True)
class Subject:
    """An algorithm to check, with the run that several checks compare others with."""

    algorithm: Algorithm
    settings: Assignments = ()
    """Settings of its runs, such as {"model.adapter": "lora"}."""

    @cached_property
    def reference(self) -> Session:
        """The finished reference run: three rounds, seed 0, one process, no interruption."""
        return _run(self)


Check = Callable[[Subject], None]


def check_algorithm(algorithm: Algorithm) -> None:
    """Run every check, and raise the first guarantee that the algorithm breaks."""
    subject = Subject(algorithm)
    for check in CHECKS:
        check(subject)


def find_fault(check: Check, subject: Subject) -> str | None:
    """Describe how a guarantee is broken, or return None. An exception breaks it too, and is located in the class."""
    try:
        check(subject)
    except Failure as failure:
        return str(failure)
    except Exception as error:
        return f"{_locate(error, subject.algorithm)}{describe_error(error)}"
    return None


def check_aggregator(rule: type[Aggregator], settings: ServerConfig | None = None) -> None:
    """Raise the first guarantee that an aggregation rule breaks; `settings` is the section [server] that it gets."""
    settings = settings or ServerConfig()
    rng, count = torch.Generator().manual_seed(0), max(5, rule.min_clients(settings))
    shapes = {"w": (3, 4), "n.running_var": (4,), "n.steps": ()}
    models = [{name: torch.randn(shape, generator=rng) for name, shape in shapes.items()} for _ in range(count)]
    for model in models:
        model["n.running_var"], model["n.steps"] = model["n.running_var"].abs(), torch.tensor(7)
    broadcast = {name: torch.zeros_like(tensor) for name, tensor in models[0].items()}

    def combine(replies: Sequence[Tensors]) -> Tensors:
        aggregator = rule(broadcast, settings)
        for tensors in replies:
            aggregator.add(tensors, 1.0)
        return aggregator.value()

    before = clone({"model": models[0]})["model"]
    combined = combine(models)
    mismatch = find_mismatch({"model": combined}, {"model": before})
    _require(mismatch is None, f"the result must have the names, dtypes and shapes of the replies: {mismatch}")
    _require(find_non_finite({"model": combined}) is None, "the result of finite replies is not finite")
    _require(_has_same_tensors(models[0], before), "add and value must not change the replies")
    _require(_has_same_tensors(combine(models), combined), "equal replies give different results")
    _require(_has_same_tensors(combine([before] * count), before), "the result of equal models is not that model")
    varied, equal = rule(broadcast, settings), rule(broadcast, settings)
    for tensors in models:
        varied.add(tensors, 1.0)
        equal.add(before, 1.0)
    separate = _has_same_tensors(varied.value(), combined) and _has_same_tensors(equal.value(), before)
    _require(separate, "objects share state: each must combine only the replies that were added to it")


def check_model(name: str, image_size: int = 32, **arguments: Any) -> None:
    """Build the network of a file, a callable or an entry point twice, and raise the first guarantee that it breaks."""
    model = ModelConfig(name=name, arguments=arguments)
    first, second = (make_image_builder(model, CLASSES, 3, 0, image_size).classifier().eval() for _ in range(2))
    _require(_has_same_tensors(first.state_dict(), second.state_dict()), "equal seeds give different first weights")
    images = torch.rand(4, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, alone = first(images), torch.cat([first(image[None]) for image in images])
    _require(tuple(together.shape) == (4, CLASSES), "a batch of images must give one row of features per image")
    _require(bool(together.isfinite().all()), "the features of finite images are not finite")
    _require(torch.allclose(together, alone, rtol=1e-3, atol=1e-4), "features depend on the other images of the batch")
    first.train()(images).sum().backward()
    gradients = [parameter.grad for parameter in first.encoder.parameters() if parameter.requires_grad]
    _require(any(grad is not None and bool(grad.any()) for grad in gradients), "no gradient reaches the encoder")


def check_dataset(name: str, root: str | None = None, **settings: Any) -> None:
    """Open a dataset twice, and raise the first guarantee that it breaks. `settings` are those of [data]."""
    data = DataConfig(name=name, root=root, **settings)
    first, second = (open_dataset(data, seed=0) for _ in range(2))
    _require(first.content == second.content and first.names == second.names, "two openings differ")
    for domain in first:
        splits = [split for split in (domain.train, domain.validation, domain.test) if split is not None]
        names = [name for split in splits for name in split.ids]
        _require(len(set(names)) == len(names), f"domain {domain.name!r} names an image twice")
        for split in splits:
            _require(split.images.dtype == np.uint8, f"images must be uint8, got {split.images.dtype}")
            _require(split.images.shape[1:] == first.image_shape, "images must have one size")
            valid = (split.labels >= 0) & (split.labels < len(first.classes))
            _require(bool(valid.all()), f"domain {domain.name!r} has a label outside of 0 to {len(first.classes) - 1}")
        again = second[domain.name]
        _require(np.array_equal(domain.train.labels, again.train.labels), "two openings give different labels")
        rows = np.arange(min(64, len(domain.train)))
        same = np.array_equal(domain.train.pixels(rows), again.train.pixels(rows))
        _require(same and domain.train.ids == again.train.ids, "two openings give different images")


def is_a_frozen_dataclass_of_plain_values(subject: Subject) -> None:
    """Hyper-parameters can be saved as TOML and JSON, and cannot be changed."""
    parameters = type(subject.algorithm).__dataclass_params__  # type: ignore[attr-defined]
    _require(parameters.frozen, f"{type(subject.algorithm).__name__} must be decorated with @dataclass(frozen=True)")
    json.dumps(get_hyper_parameters(subject.algorithm))  # raises where a field is no plain value


def a_reply_carries_what_is_declared(subject: Subject) -> None:
    """A client uploads the modules it trains and the groups it sends, and nothing else."""
    declared = set(subject.algorithm.uploads)
    with _open(subject) as (session, transport):
        replies = list(transport.train(session.state, session.roster.trainers))
    for reply in replies:
        groups = reply.tensors
        _require(groups.keys() == declared, f"a reply carries {sorted(groups)}, but {sorted(declared)} are declared")
        on_cpu = all(tensor.device.type == "cpu" for bag in groups.values() for tensor in bag.values())
        _require(on_cpu, "a reply's tensors must be on the CPU")


def the_model_has_an_encoder_and_a_head(subject: Subject) -> None:
    """The shared model is encoder.* plus head.weight and head.bias, so that a server finds every head."""
    with _open(subject) as (session, _):
        names = session.modules["model"].state_dict().keys()
    _require({"head.weight", "head.bias"} <= names, "the model must have head.weight and head.bias")
    misnamed = sorted(name for name in names if not name.startswith(("encoder.", "head.")))
    _require(not misnamed, f"the model has {misnamed}, which are neither encoder.* nor head.*")


def equal_seeds_give_equal_bits(subject: Subject) -> None:
    """Two runs of one seed are the same run; another seed is another."""
    second, reseeded = (_run(subject, seed=seed) for seed in (0, 1))
    _require(_is_same(subject.reference.state, second.state), "two runs with the same seed differ")
    _require(not _is_same(second.state, reseeded.state), "a different seed gives the same run")


def client_order_changes_nothing(subject: Subject) -> None:
    """Replies may come in any order."""
    backwards = _run(subject, transport=Backwards)
    _require(_is_same(subject.reference.state, backwards.state), "the result depends on the order of replies")


def a_resumed_run_gives_equal_bits(subject: Subject) -> None:
    """A run that was stopped and continued from its checkpoint ends as if it had not been."""
    config, federation = _make_settings(subject)
    with tempfile.TemporaryDirectory() as folder:
        for stop_after in (1, 2, 3):
            out = Path(folder, "run")
            with open_rounds(config, subject.algorithm, federation, out, resume=True) as (session, records):
                for record in records:
                    if record.round == stop_after:
                        break
    _require(_is_same(subject.reference.state, session.state), "a resumed run differs from an uninterrupted one")


def a_second_process_changes_nothing(subject: Subject) -> None:
    """Clients that are spread over two processes train to the same bits, and are tested alike."""
    alone, (config, federation) = subject.reference, _make_settings(subject)
    config = replace(config, run=replace(config.run, workers=2))
    with open_rounds(config, subject.algorithm, federation, out=None, resume=False) as (session, records):
        measured = [[(r.round, r.accuracy, r.losses, r.flops) for r in source] for source in (records, alone.records)]
    _require(_is_same(alone.state, session.state), "two processes reach a different state than one")
    _require(measured[0] == measured[1], f"two processes measure {measured[0]}, one measures {measured[1]}")


def state_is_a_value(subject: Subject) -> None:
    """Neither a client nor the server writes into the state that it was given, nor a client into its own state."""
    with _open(subject) as (session, transport):
        for round in (1, 2):
            before, cohort = session.state, session.roster.trainers
            copy = ServerState(before.round, clone(before.shared), clone(before.private))
            states = {client: clone(transport.store.load(client, round)) for client in cohort}
            session.state, _ = step_server(session, transport.train(before, cohort), cohort)
            _require(_is_same(before, copy), f"round {round} wrote into the state that it was given")
            untouched = all(_is_equal(states[client], transport.store.load(client, round)) for client in cohort)
            _require(untouched, f"round {round} wrote into the state of a client")
            _require(session.state.round == round, f"server_step must return round {round}, not {session.state.round}")


def a_reply_that_is_not_finite_or_far_too_long_is_dropped(subject: Subject) -> None:
    """The round goes on as if that client had not taken part."""
    if subject.algorithm.pools:
        return  # its only client
    poisoned = _run(subject, rounds=2, transport=Poisoned)
    absent = _run(subject, rounds=2, transport=Absent)
    for record, defect in zip(poisoned.records, ("a NaN", "values of 1e30"), strict=False):  # one, if one-shot
        _require(record.dropped.keys() == {"1"}, f"a reply with {defect} was not dropped")
    _require(_is_same(poisoned.state, absent.state), "a dropped reply changed the result")


def integer_buffers_take_the_maximum(subject: Subject) -> None:
    """BatchNorm's counters are not averaged into fractions."""
    if not subject.algorithm.one_model:
        return  # nobody averages them
    algorithm, session = subject.algorithm, subject.reference
    counters = [t for name, t in session.state.shared["model"].items() if name.endswith("num_batches_tracked")]
    if algorithm.keeps_batchnorm:
        _require(not counters, "BatchNorm counters are shared, but they must stay with the clients")
        return
    steps = session.config.local.steps * session.state.round * (len(SIZES) if algorithm.pools == "steps" else 1)
    steps = 0 if algorithm.one_shot else steps
    if algorithm.overrides_local_update:  # its networks may see a batch more than once
        steps = max(1, *map(int, counters))
    whole = [int(t) == steps and t.dtype == torch.int64 for t in counters]
    _require(bool(whole) and all(whole), f"BatchNorm counters must be in the model, and be the integer {steps}")


def it_learns(subject: Subject) -> None:
    """Training on an easy task, at the usual rate, ends well above chance, with finite losses."""
    session = _run(subject, rounds=6, sizes=(24, 24, 24), lr=LocalConfig.lr, local_steps=4)
    record = session.records[-1]
    _require(all(math.isfinite(value) for value in record.losses.values()), f"losses are not finite: {record.losses}")
    accuracy = record.accuracy_mean or 0.0
    _require(accuracy > 1.5 / CLASSES, f"accuracy is {accuracy:.2f} on an easy task, where chance is {1 / CLASSES:.2f}")


def it_survives_small_clients_and_partial_participation(subject: Subject) -> None:
    """One sample, one class, a client that joins late: all train."""
    session = _run(subject, rounds=4, active=2)
    _require(not any(record.dropped for record in session.records), "a small client's reply was dropped")


def it_trains_on_any_task_or_needs_classes(subject: Subject) -> None:
    """A method takes labels, numbers, survival times and masks, unless it declares that it computes with classes."""
    for task in TASKS:
        try:
            session = _run(subject, task=task, rounds=2)  # the second starts from what clients kept
        except Exception as error:
            fix = "set needs_classes = True if the method computes with classes"
            refused = isinstance(error, InputError) and subject.algorithm.needs_classes
            _require(refused, f"{task.name} fails with {describe_error(error)}; {fix}")
            continue
        record = session.records[-1]
        _require(not record.dropped, f"{task.name}: {record.dropped}")
        is_finite = all(map(math.isfinite, record.losses.values()))
        _require(is_finite, f"{task.name}: losses are not finite: {record.losses}")
        _require(record.score_mean is not None, f"{task.name} is not evaluated")


CHECKS: tuple[Check, ...] = (
    is_a_frozen_dataclass_of_plain_values,
    a_reply_carries_what_is_declared,
    the_model_has_an_encoder_and_a_head,
    equal_seeds_give_equal_bits,
    client_order_changes_nothing,
    a_resumed_run_gives_equal_bits,
    a_second_process_changes_nothing,
    state_is_a_value,
    a_reply_that_is_not_finite_or_far_too_long_is_dropped,
    integer_buffers_take_the_maximum,
    it_learns,
    it_survives_small_clients_and_partial_participation,
    it_trains_on_any_task_or_needs_classes,
)


class Backwards(SerialTransport):
    """Clients are trained and reply from the last to the first."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return super().train(state, cohort[::-1])


class Poisoned(SerialTransport):
    """Client 1 replies with a NaN in round 1, and with huge weights after it; integers of a one-shot method are -1."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        algorithm, value = self.trainer.algorithm, math.nan if state.round == 0 else 1e30
        for reply in super().train(state, cohort):
            poisoned = clone(reply.tensors)
            for tensor in poisoned[algorithm.uploads[0]].values():
                if tensor.is_floating_point() or algorithm.one_shot:
                    tensor.fill_(value if tensor.is_floating_point() else -1)
            yield replace(reply, tensors=poisoned) if reply.client_id == 1 else reply


class Absent(SerialTransport):
    """Client 1 does not reply."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return super().train(state, [client for client in cohort if client != 1])


def _make_settings(
    subject: Subject, seed: int = 0, sizes: Sequence[int] = SIZES, task: Task | int = CLASSES, **options: Any
) -> tuple[Config, Federation]:
    settings = {"rounds": 3, "local_steps": 2, "lr": 0.05, **options}
    config, _ = config_from_keywords(
        subject.algorithm, subject.settings, **settings, batch_size=8, seed=seed, device="cpu", layout="contiguous"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        maps = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
        encoder = maps if isinstance(task, Segmentation) else CNN(channels=1, width=2)
    clients = [(_make_toy(size, i, task), _make_toy(12, 100 + i, task)) for i, size in enumerate(sizes)]
    federation = federation_from_datasets(clients, encoder, task, latent=None, seed=seed)
    federation = replace(federation, builder=federation.builder.limit(config.model))
    return config, pool_clients(federation) if subject.algorithm.pools else federation


def _make_toy(size: int, seed: int, task: Task | int = CLASSES) -> TensorDataset:
    """Images whose bright row tells the class, or its number, label, time or pixels, on the client's own ground."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % CLASSES
    images = 0.3 * torch.randn(size, 1, 8, 8, generator=rng) + 0.2 * (seed % 100)
    images[torch.arange(size), :, labels * 2 + 1] += 2.0
    targets: dict[type, Tensor] = {
        MultiLabel: F.one_hot(labels, CLASSES),
        Regression: labels,
        Survival: torch.stack([torch.ones(size), labels + 1], dim=1),
        Segmentation: (images[:, 0] > 1).long(),
    }
    return TensorDataset(images, targets.get(type(task), labels))


@contextmanager
def _open(
    subject: Subject, transport: type[SerialTransport] = SerialTransport, **settings: Any
) -> Iterator[tuple[Session, SerialTransport]]:
    """Open a short run with the threads of every run."""
    config, federation = _make_settings(subject, **settings)
    with use_threads(config.run.threads):
        session = open_session(config, subject.algorithm, federation)
        yield session, transport(session.make_trainer(), federation.clients)


def _run(subject: Subject, **settings: Any) -> Session:
    """Do a short run to its end."""
    with _open(subject, **settings) as (session, transport):
        for _ in run_rounds(session, transport):
            pass
    return session


def _is_same(a: ServerState, b: ServerState) -> bool:
    return a.round == b.round and all(_is_equal(x, y) for x, y in ((a.shared, b.shared), (a.private, b.private)))


def _is_equal(a: Groups, b: Groups) -> bool:
    return a.keys() == b.keys() and all(_has_same_tensors(a[group], b[group]) for group in a)


def _has_same_tensors(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _locate(error: Exception, algorithm: Algorithm) -> str:
    """Return the last line of the method's own code in the traceback of an error."""
    sources = {inspect.getsourcefile(cls) for cls in type(algorithm).__mro__[:-1] if cls is not Algorithm}
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in sources]
    return f"{Path(lines[-1].filename).name}, line {lines[-1].lineno}: " if lines else ""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Failure(message)
