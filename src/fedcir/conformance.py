"""The promises that every algorithm keeps, as checks that anyone can run on one of their own.

From the command line: `fedcir algorithms ./mine.py --check`. In a test: `check_algorithm(Mine())`.
"""

import inspect
import json
import math
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config, LocalConfig
from fedcir.data.federation import Federation, federation_of, pooled
from fedcir.engine.machine import threads
from fedcir.engine.rounds import run, take_step
from fedcir.engine.session import Session, open_session
from fedcir.engine.settling import hyper_parameters, own_config
from fedcir.engine.simulate import open_rounds
from fedcir.engine.transports.serial import SerialTransport
from fedcir.models.cnn import CNN
from fedcir.models.tensors import clone
from fedcir.types import ClientReply, Groups, ServerState

CLASSES = 3
SIZES = (20, 12, 1, 9)  # a client with one sample among them


class Failure(AssertionError):
    """A promise that the algorithm does not keep."""


def check_algorithm(algorithm: Algorithm) -> None:
    """Run every check; the first promise that is not kept is raised."""
    for check in CHECKS:
        check(algorithm)


def fault(check: Callable[[Algorithm], None], algorithm: Algorithm) -> str | None:
    """What breaks a promise, in words; None if it is kept. An exception breaks it too, and is told with its place."""
    try:
        check(algorithm)
    except Failure as failure:
        return str(failure)
    except Exception as error:
        return f"{_place(error, algorithm)}{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def is_a_frozen_dataclass_of_plain_values(algorithm: Algorithm) -> None:
    """Hyper-parameters can be saved as TOML and JSON, and cannot be changed."""
    parameters = type(algorithm).__dataclass_params__  # type: ignore[attr-defined]
    _require(parameters.frozen, f"{type(algorithm).__name__} must be decorated with @dataclass(frozen=True)")
    _require(
        json.loads(json.dumps(hyper_parameters(algorithm))) is not None,
        "its fields must be plain values: numbers, texts, true or false",
    )


def a_reply_carries_what_is_declared(algorithm: Algorithm) -> None:
    """A client uploads the modules it trains and the groups it sends, and nothing else."""
    declared = {*algorithm.trains, *algorithm.sends}
    with _opened(algorithm) as (session, transport):
        replies = list(transport.train(session.state, session.roster.trainers))
    for reply in replies:
        _require(
            reply.arrays.keys() == declared,
            f"a reply carries {sorted(reply.arrays)}, but {sorted(declared)} are declared",
        )
        tensors = [tensor for bag in reply.arrays.values() for tensor in bag.values()]
        _require(all(tensor.device.type == "cpu" for tensor in tensors), "a reply's tensors must be on the CPU")


def the_model_has_an_encoder_and_a_head(algorithm: Algorithm) -> None:
    """The shared model is encoder.* plus head.weight and head.bias, so that a server finds every head."""
    with _opened(algorithm) as (session, _):
        names = session.modules["model"].state_dict().keys()
    _require({"head.weight", "head.bias"} <= names, "the model must have head.weight and head.bias")
    others = sorted(name for name in names if not name.startswith(("encoder.", "head.")))
    _require(not others, f"the model has {others}, which are neither encoder.* nor head.*")


def equal_seeds_give_equal_bits(algorithm: Algorithm) -> None:
    """Two runs of one seed are the same run; another seed is another."""
    first, second, other = (_rounds(algorithm, seed=seed) for seed in (0, 0, 1))
    _require(_same(first.state, second.state), "two runs with the same seed differ")
    _require(not _same(first.state, other.state), "a different seed gives the same run")


def client_order_changes_nothing(algorithm: Algorithm) -> None:
    """Replies may come in any order."""
    _require(
        _same(_rounds(algorithm).state, _rounds(algorithm, transport=Backwards).state),
        "the result depends on the order in which clients reply",
    )


def a_resumed_run_gives_equal_bits(algorithm: Algorithm) -> None:
    """A run that was stopped and continued from its checkpoint ends as if it had not been."""
    config, federation = _settings(algorithm)
    with tempfile.TemporaryDirectory() as folder:
        for stop_after in (1, 2, 3):
            with open_rounds(config, algorithm, federation, Path(folder, "run"), resume=True) as (session, records):
                for record in records:
                    if record.round == stop_after:
                        break
    _require(_same(_rounds(algorithm).state, session.state), "a resumed run differs from one that was not interrupted")


def a_second_process_changes_nothing(algorithm: Algorithm) -> None:
    """Clients that are spread over two processes train to the same bits, and are tested alike."""
    alone, (config, federation) = _rounds(algorithm), _settings(algorithm)
    config = replace(config, run=replace(config.run, workers=2))
    with open_rounds(config, algorithm, federation, out=None, resume=False) as (session, records):
        both = [(mine.round, mine.accuracy, mine.losses, mine.flops) for mine in records]
    _require(_same(alone.state, session.state), "two processes reach a different state than one")
    measured = [(mine.round, mine.accuracy, mine.losses, mine.flops) for mine in alone.records]
    _require(measured == both, f"two processes measure {both}, one measures {measured}")


def state_is_a_value(algorithm: Algorithm) -> None:
    """Neither a client nor the server writes into the state that it was given, nor a client into what it kept."""
    with _opened(algorithm) as (session, transport):
        for round in (1, 2):
            before, cohort = session.state, session.roster.trainers
            copy = ServerState(before.round, clone(before.shared), clone(before.private))
            kept = {client: clone(transport.store.load(client, round)) for client in cohort}
            session.state, _ = take_step(session, transport.train(before, cohort), cohort)
            _require(_same(before, copy), f"round {round} wrote into the state that it was given")
            untouched = all(_equal(kept[client], transport.store.load(client, round)) for client in cohort)
            _require(untouched, f"round {round} wrote into what a client had kept")
            made = session.state.round
            _require(made == round, f"server_step must return round {round}, but returned {made}")


def a_reply_that_is_not_finite_or_far_too_long_is_dropped(algorithm: Algorithm) -> None:
    """The round goes on as if that client had not taken part."""
    if algorithm.pools:
        return  # its only client
    poisoned = _rounds(algorithm, rounds=2, transport=Poisoned)
    absent = _rounds(algorithm, rounds=2, transport=Absent)
    for record, what in zip(poisoned.records, ("a NaN", "values of 1e30"), strict=True):
        _require(record.dropped.keys() == {"1"}, f"a reply with {what} was not dropped")
    _require(_same(poisoned.state, absent.state), "a dropped reply changed the result")


def integer_buffers_take_the_maximum(algorithm: Algorithm) -> None:
    """BatchNorm's counters are not averaged into fractions."""
    if not algorithm.one_model:
        return  # nobody averages them
    session = _rounds(algorithm)
    counters = [t for name, t in session.state.shared["model"].items() if name.endswith("num_batches_tracked")]
    if algorithm.keeps_batchnorm:
        _require(not counters, "BatchNorm counters are shared, but they must stay with the clients")
        return
    steps = session.config.local.steps * session.state.round * (len(SIZES) if algorithm.pools == "steps" else 1)
    _require(bool(counters), "the model has lost its BatchNorm counters")
    _require(
        all(int(t) == steps and t.dtype == torch.int64 for t in counters),
        f"BatchNorm counters must be the integer {steps}",
    )


def it_learns(algorithm: Algorithm) -> None:
    """Training on an easy task, at the usual rate, ends well above chance, with finite losses."""
    session = _rounds(algorithm, rounds=6, sizes=(24, 24, 24), lr=LocalConfig.lr, steps=4)
    record = session.records[-1]
    _require(all(math.isfinite(value) for value in record.losses.values()), f"losses are not finite: {record.losses}")
    accuracy = record.accuracy_mean or 0.0
    _require(accuracy > 1.5 / CLASSES, f"accuracy is {accuracy:.2f} on an easy task, where chance is {1 / CLASSES:.2f}")


def it_survives_small_clients_and_partial_participation(algorithm: Algorithm) -> None:
    """One sample, one class, a client that joins late: all train."""
    session = _rounds(algorithm, rounds=4, active=2)
    _require(not any(record.dropped for record in session.records), "a small client's reply was dropped")


CHECKS: tuple[Callable[[Algorithm], None], ...] = (
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
)


class Backwards(SerialTransport):
    """Clients are trained and reply from the last to the first."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return super().train(state, cohort[::-1])


class Poisoned(SerialTransport):
    """Client 1 replies with a NaN in round 1, and with huge weights after it."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        value = math.nan if state.round == 0 else 1e30
        for reply in super().train(state, cohort):
            group = self.bench.algorithm.trains[0]
            bag = {
                name: torch.full_like(t, value) if t.is_floating_point() else t
                for name, t in reply.arrays[group].items()
            }
            yield replace(reply, arrays={**reply.arrays, group: bag}) if reply.client_id == 1 else reply


class Absent(SerialTransport):
    """Client 1 does not reply."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return super().train(state, [client for client in cohort if client != 1])


def _settings(
    algorithm: Algorithm,
    seed: int = 0,
    rounds: int = 3,
    active: int | None = None,
    sizes: Sequence[int] = SIZES,
    lr: float = 0.05,
    steps: int = 2,
) -> tuple[Config, Federation]:
    settings = {"rounds": rounds, "active": active, "local_steps": steps, "batch_size": 8, "lr": lr, "seed": seed}
    config, _ = own_config(algorithm, (), **settings, device="cpu", layout="contiguous")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = CNN(channels=1, width=2)
    clients = [(_toy(size, seed=i), _toy(12, seed=100 + i)) for i, size in enumerate(sizes)]
    federation = federation_of(clients, encoder, CLASSES, latent=None, seed=seed)
    return config, pooled(federation) if algorithm.pools else federation


def _toy(size: int, seed: int) -> TensorDataset:
    """Images whose bright row tells the class, on a ground of the client's own brightness."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % CLASSES
    images = 0.3 * torch.randn(size, 1, 8, 8, generator=rng) + 0.2 * (seed % 100)
    images[torch.arange(size), :, labels * 2 + 1] += 2.0
    return TensorDataset(images, labels)


@contextmanager
def _opened(
    algorithm: Algorithm, transport: type[SerialTransport] = SerialTransport, **settings: Any
) -> Iterator[tuple[Session, SerialTransport]]:
    """A short run, with as many threads as any other."""
    config, federation = _settings(algorithm, **settings)
    with threads(config.run.threads):
        session = open_session(config, algorithm, federation)
        yield session, transport(session.workbench(), federation.clients)


def _rounds(algorithm: Algorithm, **settings: Any) -> Session:
    """A short run, done."""
    with _opened(algorithm, **settings) as (session, transport):
        for _ in run(session, transport):
            pass
    return session


def _same(a: ServerState, b: ServerState) -> bool:
    return a.round == b.round and all(_equal(x, y) for x, y in ((a.shared, b.shared), (a.private, b.private)))


def _equal(a: Groups, b: Groups) -> bool:
    def bits(groups: Groups) -> dict[tuple[str, str], Tensor]:
        return {(group, name): tensor for group, bag in groups.items() for name, tensor in bag.items()}

    first, second = bits(a), bits(b)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def _place(error: Exception, algorithm: Algorithm) -> str:
    """The last line of the method's own that an error came through."""
    own = {inspect.getsourcefile(cls) for cls in type(algorithm).__mro__[:-1] if cls is not Algorithm}
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    return f"{Path(lines[-1].filename).name}, line {lines[-1].lineno}: " if lines else ""


def _require(kept: bool, message: str) -> None:
    if not kept:
        raise Failure(message)
