"""A fedcir algorithm as a Flower Strategy, for a ServerApp of your own."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import DEFAULT_ALGORITHM, Assignments, LocalConfig, ModelConfig, RunConfig, ServerConfig
from fedcir.data.federation import SiteRoster
from fedcir.errors import InputError, RunError
from fedcir.flower.server_app import check_deployable
from fedcir.flower.site_manifest import list_clients, sort_sites
from fedcir.flower.transport import ROUND_TIMEOUT, SITES, WAIT_SECONDS, GridTransport, NodeRegistry
from fedcir.flower.wire import TaskHeader, pack_arrays, unpack_arrays
from fedcir.machine import use_threads
from fedcir.models.builder import make_module_builder
from fedcir.models.tensors import find_mismatch
from fedcir.runtime.resolution import config_from_keywords
from fedcir.runtime.rounds import step_server
from fedcir.runtime.session import Session, open_session
from fedcir.server.replies import tally_evaluations
from fedcir.tasks.classification import choose_task, describe_task
from fedcir.tasks.task import Task
from fedcir.types import ClientReply, DroppedReply, Groups

log = logging.getLogger("flwr")


class AlgorithmStrategy(Strategy):
    """Trains `encoder` and a classifier on top by a method of fedcir; clients reply with `local_update`.

    `example` is a batch of inputs of the right shape, such as torch.zeros(2, 3, 32, 32). A round begins once `sites`
    nodes are connected; clients are sampled by `seed` over the names that the sites give themselves. There are
    `rounds` rounds, unless `start` says otherwise. `set` holds any other settings of `local`, `server`, `run` and
    `privacy`: {"local.balance": "classes"}. After the last round that `privacy.epsilon` allows, nothing changes.

    No other strategy may wrap this one. Flower's wrappers for differential privacy protect only the mean of the
    model, while most methods make more of replies than their mean: set `privacy.clip` and `privacy.noise` instead.
    """

    def __init__(
        self,
        algorithm: Algorithm | type[Algorithm] | str | Path = DEFAULT_ALGORITHM,
        *,
        encoder: nn.Module,
        example: Tensor,
        num_classes: int | None = None,
        task: Task | None = None,
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
        wait: float = WAIT_SECONDS,
    ) -> None:
        self.sites, self.wait = sites, wait
        self.config, self.algorithm = config_from_keywords(
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
        if self.config.server.masked:
            raise InputError(
                "server.masked asks again if a site is lost, which Flower's loop cannot: use the ServerApp"
            )
        if self.config.server.store_sums:
            raise InputError("server.store_sums needs the run folder of the ServerApp: leave it out")
        with use_threads(self.config.run.threads):
            self._builder = make_module_builder(
                encoder, example, choose_task(task, num_classes), self.config.model.latent, self.config.run.seed
            ).limit(self.config.model)
        self._started = False
        self._timeout = ROUND_TIMEOUT
        self._transport: GridTransport | None = None
        self._sent: dict[int, Message] = {}
        self._missing: dict[int, str] = {}
        self._cohort: list[int] = []
        self._epsilon: float | None = None
        self._budget_spent = False

    def initial_arrays(self) -> ArrayRecord:
        """Return the arrays that training starts from."""
        session = self._open_session([])
        return pack_arrays(session.state.shared, self.algorithm.trains)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = ROUND_TIMEOUT,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run Flower's own loop, by default over `rounds` and from the encoder's weights."""
        num_rounds = self.config.server.rounds if num_rounds is None else num_rounds
        self.config = replace(self.config, server=replace(self.config.server, rounds=num_rounds))
        self._started, self._timeout, self._transport = True, timeout, None
        arrays = self.initial_arrays() if initial_arrays is None else initial_arrays
        return super().start(grid, arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages for the cohort of a round."""
        if not self._started:  # a wrapper runs its own loop, and never calls start() of the strategy inside
            raise InputError(
                "AlgorithmStrategy must be started itself, not inside another strategy: in place of Flower's wrappers "
                'for differential privacy, set {"privacy.clip": ..., "privacy.noise": ...}'
            )
        transport = self._open_transport(grid)
        session = transport.session
        groups = _unpack_received(arrays)
        if (reason := find_mismatch(groups, session.evaluation_groups(session.state))) is not None:
            raise InputError(f"initial_arrays do not fit, {reason}: give those of AlgorithmStrategy.initial_arrays()")
        session.state = replace(session.state, round=server_round - 1, shared={**session.state.shared, **groups})
        try:
            self._epsilon = session.spend_epsilon()
        except RunError as error:  # Flower's loop goes on, with the model as it is
            log.warning("%s", error)
            self._budget_spent = True
            return []
        self._cohort = session.cohort(server_round)
        return self._make_messages(MessageType.TRAIN, server_round, session.state.shared, self._cohort, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the server's step: return the next arrays, and the mean of every loss, or epsilon instead."""
        session = self._require_transport().session
        if self._budget_spent:
            return None, None
        with use_threads(self.config.run.threads):
            session.state, collected = step_server(session, self._read(replies, session.template()), self._cohort)
        metrics: dict[str, float] = {}
        if self._epsilon is None:
            metrics = {f"loss/{name}": value for name, value in collected.losses().items()}
        else:
            metrics["epsilon"] = self._epsilon
        if not session.has_secret_cohort:
            _log_dropped(collected.dropped)
            metrics |= {"replies": collected.count, "dropped": len(collected.dropped)}
        return pack_arrays(session.state.shared, self.algorithm.trains), MetricRecord({**metrics})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages for every site that evaluates."""
        evaluators = sorted(self._open_transport(grid).session.roster.evaluators)
        return self._make_messages(MessageType.EVALUATE, server_round, _unpack_received(arrays), evaluators, config)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the task's primary metric on test data: the mean over sites, the worst, and that of each site."""
        session = self._require_transport().session
        dropped: dict[str, str] = {}
        tests = tally_evaluations(session.roster, self._read(replies, {}), dropped)
        _log_dropped(dropped)
        fields, name = tests.to_fields(session.roster.unseen), tests.task.primary.name
        if fields["score_mean"] is None:
            return None
        by_domain = {f"{name}/{domain}": value for domain, value in fields["scores"].items()}
        return MetricRecord({name: fields["score_mean"], f"{name}-worst": fields["score_worst"], **by_domain})

    def summary(self) -> None:
        log.info("\t├──> Algorithm: %s", self.algorithm)
        log.info("\t└──> Local: %s", self.config.local)

    def _open_transport(self, grid: Grid) -> GridTransport:
        """Return the transport; the participants are determined when the first round begins."""
        if self._transport is None:
            registry = NodeRegistry(grid, TaskHeader(self.config, {}))
            registry.wait(self.sites, self.wait)
            clients = list_clients(sort_sites(registry.sites.values()))
            registry.bind_keys(clients)
            session = self._open_session(clients)
            self._transport = GridTransport(registry, session, clients, f"{grid.run.run_id:x}", self._timeout)
        return self._transport

    def _require_transport(self) -> GridTransport:
        if self._transport is None:
            raise InputError("call configure_train before aggregate_train and aggregate_evaluate")
        return self._transport

    def _open_session(self, clients: list[dict[str, object]]) -> Session:
        """Open a session of these clients; without any, one that only serves for the initial weights."""
        placeholder = {"id": 0, "domain": "", "train": 1, "test": 0, "validation": 0}
        manifest = {"clients": clients or [placeholder], "hash": ""}
        roster = SiteRoster(manifest, self._builder, describe_task(self._builder.task))
        one_client = replace(self.config.server, active=None, min_replies=1)
        config = self.config if clients else replace(self.config, server=one_client)
        with use_threads(config.run.threads):
            session = open_session(config, self.algorithm, roster)
        session.deployed = True
        return session

    def _make_messages(
        self, kind: str, round: int, groups: Groups, cohort: list[int], config: ConfigRecord
    ) -> list[Message]:
        """Make a cohort's messages, with the caller's config and the round under the name that Flower uses."""
        values, transport = {**config, "server-round": round}, self._require_transport()
        self._sent, self._missing = transport.make_messages(kind, round, groups, cohort, config=values)
        return list(self._sent.values())

    def _read(self, replies: Iterable[Message], template: Groups) -> Iterator[ClientReply | DroppedReply]:
        transport = self._require_transport()
        for client, reason in self._missing.items():
            yield DroppedReply(client, reason)
        requests = {message.metadata.message_id: (client, message.metadata) for client, message in self._sent.items()}
        for reply in replies:
            if (request := requests.get(reply.metadata.reply_to_message_id)) is not None:
                yield transport.read(*request, reply, template)


def _unpack_received(arrays: ArrayRecord) -> Groups:
    """Unpack arrays for clients. Noise that a mod of Flower's adds may make a variance negative: it becomes 0."""
    groups = unpack_arrays(arrays)
    for bag in groups.values():
        for name in bag:
            if name.endswith("running_var"):
                bag[name].clamp_(min=0)
    return groups


def _log_dropped(dropped: dict[str, str]) -> None:
    for client, reason in dropped.items():
        log.warning("client %s dropped: %s", client, reason)
