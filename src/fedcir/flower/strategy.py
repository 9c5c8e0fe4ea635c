"""An algorithm of ours as a Flower Strategy, for a ServerApp of one's own."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import DEFAULT_ALGORITHM, Assignments, LocalConfig, ModelConfig, RunConfig, ServerConfig
from fedcir.engine.machine import threads
from fedcir.engine.replies import tally
from fedcir.engine.rounds import take_step
from fedcir.engine.session import Session, open_session
from fedcir.engine.settling import own_config
from fedcir.engine.valid import training_fault
from fedcir.flower.agreement import SiteRoster, entries, in_order
from fedcir.flower.patience import SITES, TIMEOUT, WAIT
from fedcir.flower.server_app import check_deployable
from fedcir.flower.sites import Sites
from fedcir.flower.transport import GridTransport
from fedcir.flower.wire import Order, pack_arrays, unpack_arrays
from fedcir.flower.wrapped import check_private, guard, wrapper_fault, wrapper_of
from fedcir.models.task import module_task
from fedcir.models.tensors import difference
from fedcir.types import ClientReply, Dropped, Groups, InputError, RunError

log = logging.getLogger("flwr")


class AlgorithmStrategy(Strategy):
    """Trains `encoder` and a classifier on top by a method of fedcir; clients answer with `local_update`.

    `example` is a batch of inputs of the right shape, such as torch.zeros(2, 3, 32, 32). A round begins once `sites`
    nodes are there; clients are sampled by `seed` over the names that the sites give themselves. There are
    `rounds` of them, unless `start` says otherwise; if another strategy wraps this one, only `rounds` is known here.
    `set` holds any other settings of `local`, `server`, `run` and `privacy`: {"local.balance": "classes"}. After the
    last round that `privacy.epsilon` allows, nothing changes.
    """

    def __init__(
        self,
        algorithm: Algorithm | type[Algorithm] | str | Path = DEFAULT_ALGORITHM,
        *,
        encoder: nn.Module,
        example: Tensor,
        num_classes: int,
        sites: int = SITES,
        rounds: int = ServerConfig.rounds,
        local_steps: int = LocalConfig.steps,
        batch_size: int = LocalConfig.batch_size,
        lr: float = LocalConfig.lr,
        momentum: float = LocalConfig.momentum,
        weight_decay: float = LocalConfig.weight_decay,
        prior: Literal["none", "client"] | None = None,
        active: int | None = ServerConfig.active,
        min_replies: int = ServerConfig.min_replies,
        latent: int | None = ModelConfig.latent,
        seed: int = RunConfig.seed,
        set: Assignments = (),
        wait: float = WAIT,
    ) -> None:
        self.sites, self.wait = sites, wait
        self.config, self.algorithm = own_config(
            algorithm,
            set,
            rounds=rounds,
            local_steps=local_steps,
            batch_size=batch_size,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            prior=prior,
            active=active,
            min_replies=min_replies,
            latent=latent,
            seed=seed,
            layout="contiguous",
        )
        check_deployable(self.config, self.algorithm)
        with threads(self.config.run.threads):
            self._task = module_task(encoder, example, num_classes, self.config.model.latent, self.config.run.seed)
        self._timeout = TIMEOUT
        self._transport: GridTransport | None = None
        self._sent: dict[int, Message] = {}
        self._missing: dict[int, str] = {}
        self._cohort: list[int] = []
        self._guarded: Strategy | None = None
        """The strategy that wraps this one, and is shown no reply that cannot be used."""
        self._epsilon: float | None = None
        self._spent = False

    def initial_arrays(self) -> ArrayRecord:
        """What training starts from."""
        session = self._open([])
        return pack_arrays(session.state.shared, self.algorithm.trains)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = TIMEOUT,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Flower's own loop, over `rounds` if not said otherwise; it starts from the encoder's weights if not given."""
        num_rounds = self.config.server.rounds if num_rounds is None else num_rounds
        self.config = replace(self.config, server=replace(self.config.server, rounds=num_rounds))
        self._timeout, self._transport = timeout, None
        arrays = self.initial_arrays() if initial_arrays is None else initial_arrays
        return super().start(grid, arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages for the cohort of a round."""
        self._meet(wrapper_of(self))
        transport = self._begin(grid)
        session = transport.session
        groups = _received(arrays)
        if (reason := difference(groups, session.to_test(session.state))) is not None:
            raise InputError(f"initial_arrays do not fit, {reason}: give those of AlgorithmStrategy.initial_arrays()")
        session.state = replace(session.state, round=server_round - 1, shared={**session.state.shared, **groups})
        try:
            self._epsilon = session.spend()
        except RunError as error:  # Flower's loop goes on, with the model as it is
            log.warning("%s", error)
            self._spent = True
            return []
        self._cohort = session.cohort(server_round)
        shared = session.state.shared
        self._sent, self._missing = transport.messages(
            MessageType.TRAIN, server_round, shared, self._cohort, _with_round(config, server_round)
        )
        return list(self._sent.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The server's step: the next arrays, and the mean of every loss, or epsilon in its place."""
        transport = self._begun()
        if self._spent:
            return None, None
        session = transport.session
        with threads(self.config.run.threads):
            session.state, collected = take_step(session, self._read(replies, session.template()), self._cohort)
        metrics: dict[str, float] = {}
        if self._epsilon is None:
            metrics = {f"loss/{name}": value for name, value in collected.losses().items()}
        else:
            metrics["epsilon"] = self._epsilon
        if not session.has_secret_cohort:
            _tell(collected.dropped)
            metrics |= {"replies": collected.count, "dropped": len(collected.dropped)}
        return pack_arrays(session.state.shared, self.algorithm.trains), MetricRecord({**metrics})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages for every site, to test what was made."""
        transport = self._begin(grid)
        self._sent, self._missing = transport.messages(
            MessageType.EVALUATE,
            server_round,
            _received(arrays),
            sorted(transport.session.roster.evaluators),
            _with_round(config, server_round),
        )
        return list(self._sent.values())

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Test accuracy: the mean over sites, the worst, and each site's own."""
        session = self._begun().session
        dropped: dict[str, str] = {}
        tests = tally(session.roster, self._read(replies, {}), dropped)
        _tell(dropped)
        found = tests.accuracies(session.roster.unseen)
        if found["accuracy_mean"] is None:
            return None
        each = {f"accuracy/{domain}": value for domain, value in tests.accuracy().items()}
        return MetricRecord({"accuracy": found["accuracy_mean"], "accuracy-worst": found["accuracy_worst"], **each})

    def summary(self) -> None:
        log.info("\t├──> Algorithm: %s", self.algorithm)
        log.info("\t└──> Local: %s", self.config.local)

    def _begin(self, grid: Grid) -> GridTransport:
        """Who takes part, settled when the first round begins."""
        if self._transport is None:
            sites = Sites(grid, Order(self.config, {}))
            sites.wait(self.sites, self.wait)
            clients = entries(in_order(sites.introductions.values()))
            sites.bind(clients)
            session = self._open(clients)
            self._transport = GridTransport(sites, session, clients, _key(grid), self._timeout)
        return self._transport

    def _begun(self) -> GridTransport:
        if self._transport is None:
            raise InputError("call configure_train before aggregate_train and aggregate_evaluate")
        return self._transport

    def _open(self, clients: list[dict[str, object]]) -> Session:
        """A session of these clients; without any, one that knows the first weights."""
        nobody = {"id": 0, "domain": "", "train": 1, "test": 0, "validation": 0}
        manifest = {"clients": clients or [nobody], "hash": ""}
        classes = [str(number) for number in range(self._task.num_classes)]
        roster = SiteRoster(manifest, self._task, {"classes": classes})
        alone = replace(self.config.server, active=None, min_replies=1)
        config = self.config if clients else replace(self.config, server=alone)
        with threads(config.run.threads):
            session = open_session(config, self.algorithm, roster)
        session.deployed = True
        return session

    def _meet(self, wrapper: Strategy | None) -> None:
        """Come to terms with a strategy that wraps this one: it may be refused, and it is shown no faulty reply."""
        if wrapper is not None and wrapper is not self._guarded:
            check_private(wrapper, self.algorithm, self.config.algorithm.name)
            guard(wrapper, self, partial(self._usable, wrapper))
            self._guarded = wrapper

    def _usable(self, wrapper: Strategy, message: Message) -> bool:
        """Whether a reply can be shown to a wrapper; why not is told when the server's step is taken."""
        session = self._begun().session
        reply = next(self._answers([message], session.template()), None)
        if reply is None:
            return False
        if isinstance(reply, ClientReply):
            reason = training_fault(reply, session.roster.sizes.get(reply.client_id))
            reason = reason or wrapper_fault(wrapper, message, self._sent[reply.client_id])
        else:
            reason = reply.reason
        if reason is not None:
            self._missing[reply.client_id] = reason
        return reason is None

    def _read(self, replies: Iterable[Message], template: Groups) -> Iterator[ClientReply | Dropped]:
        for client, reason in self._missing.items():
            yield Dropped(client, reason)
        yield from self._answers(replies, template)

    def _answers(self, replies: Iterable[Message], template: Groups) -> Iterator[ClientReply | Dropped]:
        transport = self._begun()
        asked = {message.metadata.message_id: (client, message.metadata) for client, message in self._sent.items()}
        for reply in replies:
            if (question := asked.get(reply.metadata.reply_to_message_id)) is not None:
                yield transport.read(*question, reply, template)


def _received(arrays: ArrayRecord) -> Groups:
    """Arrays as clients get them. Noise that a wrapper has added may leave a variance below zero, which none is."""
    groups = unpack_arrays(arrays)
    for bag in groups.values():
        for name in bag:
            if name.endswith("running_var"):
                bag[name].clamp_(min=0)
    return groups


def _with_round(config: ConfigRecord, round: int) -> ConfigRecord:
    """The caller's config, which is not written to, with the number that Flower's own strategies put there."""
    return ConfigRecord({**config, "server-round": round})


def _key(grid: Grid) -> str:
    return f"{grid.run.run_id:x}"


def _tell(dropped: dict[str, str]) -> None:
    for client, reason in dropped.items():
        log.warning("client %s dropped: %s", client, reason)
