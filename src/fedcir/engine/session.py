"""A run under way, and the one way to open it: from a config and a roster, whatever carries the messages."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcir.algorithms import named_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import (
    OPTIONS,
    AlgorithmConfig,
    Asked,
    Assignments,
    Config,
    LocalConfig,
    build,
    config_from,
    config_tables,
    merged,
)
from fedcir.data.federation import Roster
from fedcir.engine.accounting import Accountant, Releases
from fedcir.engine.client import Workbench, learning_rate
from fedcir.engine.dpsgd import check_examples
from fedcir.engine.folder import RunFolder
from fedcir.engine.machine import layout_for, pick_device, unsafe_in_channels_last
from fedcir.engine.norms import Screen
from fedcir.engine.privacy import PrivateMean, check_private
from fedcir.engine.store import ClientStore
from fedcir.engine.uploads import Upload, encoded
from fedcir.models.task import Task
from fedcir.models.tensors import batchnorm_names, is_statistic, snapshot
from fedcir.rng import numpy_rng, secret_rng, torch_rng
from fedcir.types import (
    Arrays,
    Groups,
    InputError,
    LocalContext,
    Modules,
    RoundRecord,
    RunError,
    ServerContext,
    ServerState,
)

PRIVACY = "privacy"
"""The server's group that holds the norm it clips to."""


@dataclass
class Session:
    """A run under way: what is fixed, and the state and records that grow with each round."""

    config: Config
    algorithm: Algorithm
    modules: Modules
    """The server's own copy of the networks."""
    roster: Roster
    """Who takes part, and in what."""
    state: ServerState
    records: list[RoundRecord] = field(default_factory=list)
    folder: RunFolder | None = None
    notes: tuple[str, ...] = ()
    """What the user should know about the data."""
    loading: float = 0.0
    """Seconds that opening it took; they count with its first round."""
    peak_memory: int = 0
    """Bytes held at most by all processes of this machine, since it was opened."""
    store: ClientStore = field(default_factory=ClientStore)
    """What clients of this machine keep."""
    deployed: bool = False
    """Whether clients are sites of others, so that noise must come from the system and not from the seed."""

    @property
    def card(self) -> dict[str, Any]:
        """What a user of the model must know, and what it takes to build it again; no path, as equal runs are equal."""
        model = {name: value for name, value in config_tables(self.config)["model"].items() if name != "weights"}
        if (file := self.config.model.file) is not None:
            model["name"] = f"{file.name}:{self.config.model.name.rpartition(':')[2]}"
        method = self.config.algorithm
        about = {"model": model, "algorithm": {"name": Path(method.name).stem, **method.fields}}
        return {**self.roster.card, **about}

    @property
    def model(self) -> Arrays:
        """The tensors of the model for all, a frozen encoder's too; none where each client keeps its own."""
        return {**self._frozen(), **self.state.shared.get("model", {})}

    def _frozen(self) -> Arrays:
        """What the whole model has beside what clients train."""
        if self.roster.task.frozen is None:
            return {}
        whole, trained = self.algorithm.build(self.roster.task.whole())["model"], self.modules["model"].state_dict()
        return {name: tensor for name, tensor in snapshot(whole).items() if name not in trained}

    @property
    def finished(self) -> bool:
        return self.state.round >= self.config.server.rounds

    def template(self) -> Groups:
        """What a reply must look like: names, shapes and dtypes."""
        local, rounds, round = self.config.local, self.config.server.rounds, self.state.round + 1
        ctx = LocalContext(
            round=round,
            total_rounds=rounds,
            num_classes=self.roster.task.num_classes,
            batch_size=local.batch_size,
            received=self.state.shared,
            rng=torch.Generator(),
            steps=local.steps,
            lr=learning_rate(local, round, rounds),
            momentum=local.momentum,
        )
        with torch.no_grad():
            whole = {**self.to_test(self.state), **self.algorithm.local_summary(self.modules, (), ctx)}
        if self.upload == "float32":
            return whole
        return encoded(whole, self.state.shared, {}, self.upload, numpy_rng(0))[0]

    @property
    def upload(self) -> Upload:
        return upload_of(self.config, self.algorithm)

    def screen(self) -> Screen:
        """What drops replies of the next round that are too long."""
        trained = [group for group in self.algorithm.trains if group not in self.algorithm.sends]
        # Where updates are clipped, whether one counts must not depend on another client's.
        factor = self.config.server.max_update if self.config.privacy.clip is None else 0.0
        return Screen(self.state.shared, trained, factor)

    def cohort(self, round: int) -> list[int]:
        """The clients that train in a round, in ascending order."""
        trainers, seed = self.roster.trainers, self.config.run.seed
        active = min(self.config.server.active or len(trainers), len(trainers))
        if self.config.privacy.by_server and active < len(trainers):
            rng = secret_rng() if self.deployed else numpy_rng(seed, "poisson", round)
            return poisson_cohort(trainers, active / len(trainers), rng)
        return sample_cohort(trainers, active, seed, round)

    def private_mean(self) -> PrivateMean | None:
        """What the server makes of the coming round's replies, if it is to protect them."""
        privacy, round = self.config.privacy, self.state.round + 1
        if privacy.clip is None or not privacy.by_server:
            return None
        clip = self.state.private[PRIVACY]["clip"] if PRIVACY in self.state.private else privacy.clip
        rng = secret_rng() if self.deployed else numpy_rng(self.config.run.seed, PRIVACY, round)
        return PrivateMean(privacy, float(clip), self.config.server.active or len(self.roster.trainers), rng)

    def spend(self) -> float | None:
        """Count the coming round before any of it leaves a client, unless privacy.epsilon forbids it; gives epsilon."""
        round, limit = self.state.round + 1, self.config.privacy.epsilon
        epsilon = epsilon_after(self.config, self.roster, round, self._repeated)
        if limit is not None and epsilon is not None and epsilon > limit:
            raise RunError(
                f"round {round} would bring epsilon to {epsilon:.3g}, above privacy.epsilon={limit:g}: "
                "raise it to go on"
            )
        if epsilon is not None and (releases := self._releases) is not None:
            releases.add()
        return epsilon

    @property
    def _releases(self) -> Releases | None:
        return Releases(self.folder.path / "releases") if self.deployed and self.folder is not None else None

    @property
    def _repeated(self) -> int:
        """Rounds that a deployment has done more than once."""
        return 0 if self._releases is None else max(0, self._releases.count() - self.state.round)

    def workbench(self, device: str | None = None) -> Workbench:
        return workbench(self.config, self.algorithm, self.roster.task, device)

    def to_test(self, state: ServerState) -> Groups:
        """The part of a state that is sent to the clients that test it."""
        return {name: state.shared[name] for name in self.algorithm.trains}

    def context(self, round: int) -> ServerContext:
        rng = torch_rng(self.config.run.seed, "server", round)
        server, batch = self.config.server, self.config.local.batch_size
        norm = self.config.model.batchnorm
        classes, clients = self.roster.task.num_classes, len(self.roster.trainers)
        return ServerContext(
            *(round, server.rounds, classes, batch, server.weighting, norm, rng, clients),
            sent=self.state.shared,
            aggregation="mean" if self.algorithm.pools else server.aggregation,  # there is one client only
            trim=server.trim,
            byzantine=server.byzantine,
            clip=server.clip,
        )


def sample_cohort(trainers: Sequence[int], active: int, seed: int, round: int) -> list[int]:
    """The clients of a round, in ascending order."""
    if active == len(trainers):
        return sorted(trainers)
    chosen = numpy_rng(seed, "cohort", round).choice(sorted(trainers), size=active, replace=False)
    return sorted(int(client) for client in chosen)


def poisson_cohort(trainers: Sequence[int], rate: float, rng: np.random.Generator) -> list[int]:
    """Each client takes part by a draw of its own, as the accountant assumes; perhaps nobody does."""
    return [client for client, drawn in zip(sorted(trainers), rng.random(len(trainers)), strict=True) if drawn < rate]


def epsilon_after(config: Config, roster: Roster, rounds: int, repeated: int = 0) -> float | None:
    """Of so many rounds of a settled config; None without noise.

    A noised mean says something of every client in every round, and less if nobody knows who took part. A noised
    upload says something of a client only where it took part, which the server knows: the most active one counts.
    Where a unit is an example, the one counts whose chance to be drawn, in all steps of its client, is the highest.
    """
    privacy, trainers = config.privacy, roster.trainers
    if not privacy.noise:
        return None
    active = config.server.active or len(trainers)
    if privacy.by_server:
        return Accountant(privacy.noise, privacy.delta, active / len(trainers)).epsilon(rounds + repeated)
    drawn = Counter(
        client for round in range(1, rounds + 1) for client in sample_cohort(trainers, active, config.run.seed, round)
    )
    if privacy.by_clients:
        return Accountant(privacy.noise, privacy.delta).epsilon(max(drawn.values(), default=0) + repeated)
    held = {client["id"]: sized(client["train"]) for client in roster.manifest["clients"]}
    fewest = {times: min(held[client] for client in drawn if drawn[client] == times) for times in set(drawn.values())}
    return max(
        Accountant(privacy.noise, privacy.delta, min(1.0, config.local.batch_size / images)).epsilon(
            (times + repeated) * config.local.steps
        )
        for times, images in fewest.items()
    )


def sized(train: object) -> int:
    """Training images of a client in a manifest, which holds their names or their number."""
    return len(train) if isinstance(train, list) else int(str(train))


def open_session(config: Config, algorithm: Algorithm, roster: Roster) -> Session:
    """A run before its first round: the config settled, the networks made."""
    modules = algorithm.build(roster.task)
    session = Session(
        settled(config, algorithm, roster), algorithm, modules, roster, ServerState(0, {}), notes=roster.notes
    )
    state = algorithm.start(modules, session.context(0))
    own = own_tensors(config, algorithm, modules["model"])
    shared = {
        group: {name: tensor for name, tensor in bag.items() if group != "model" or name not in own}
        for group, bag in state.shared.items()
    }
    session.state = replace(state, shared=shared)
    check_private(session.config, algorithm, session.to_test(session.state))
    if config.privacy.by_steps:
        check_examples(session.config, algorithm, modules["model"])
    asked, limit = config.server.rounds, config.privacy.epsilon
    if limit is not None and session.config.server.rounds < asked:
        spent = f"privacy.epsilon={limit:g} is used up after {session.config.server.rounds} of {asked} rounds"
        session.notes = (*session.notes, f"{spent}: the run ends there")
    return session


def settled(config: Config, algorithm: Algorithm, roster: Roster) -> Config:
    """The config with everything that was left open settled, as it is saved."""
    clients = roster.holders
    active = clients if config.server.active is None else config.server.active
    if active > clients:
        raise InputError(f"server.active is {active}, but there are {clients} clients: lower it")
    if config.server.min_replies > active:
        raise InputError(
            f"server.min_replies is {config.server.min_replies}, but only {active} clients are active: lower it"
        )
    if not algorithm.pools:
        _check_aggregation(config, algorithm, active)
    run = replace(config.run, device=str(pick_device(config.run.device)))
    if run.layout == "auto":
        run = replace(run, layout=layout_for(config.model, roster.card.get("image_size", 0), roster.task.encoder))
    elif run.layout == "channels_last" and (fault := unsafe_in_channels_last(roster.task.encoder())):
        raise InputError(f"run.layout=channels_last is not safe with {fault}: leave it out")
    if config.server.upload != "float32" and not algorithm.one_model:
        raise InputError(
            f"{config.algorithm.name} uploads no model, and server.upload={config.server.upload} rounds the changes of "
            "one: leave it out"
        )
    build(type(algorithm), hyper_parameters(algorithm), "algorithm")  # one made in Python has not been checked
    config = replace(config, server=replace(config.server, active=active))
    return replace(
        config,
        server=replace(config.server, rounds=_affordable(config, roster)),
        algorithm=AlgorithmConfig(config.algorithm.name, hyper_parameters(algorithm)),
        run=run,
    )


def _check_aggregation(config: Config, algorithm: Algorithm, active: int) -> None:
    """Refuse a form that has too few clients to choose from, or no model to be of."""
    form, bad = config.server.aggregation, config.server.byzantine or 0
    if form != "mean" and not algorithm.one_model:
        raise InputError(
            f"server.aggregation={form} is of models, but {config.algorithm.name} shares none: set it to mean"
        )
    if form == "krum" and active < 2 * bad + 3:
        raise InputError(
            f"server.aggregation=krum needs {2 * bad + 3} active clients where server.byzantine={bad} may be bad, "
            f"but there are {active}: lower server.byzantine, or choose another form"
        )
    if form in ("median", "trimmed-mean") and active < 3:
        raise InputError(
            f"server.aggregation={form} needs 3 active clients, but there are {active}: choose another form"
        )


def _affordable(config: Config, roster: Roster) -> int:
    """The rounds that were asked for, or as many of them as privacy.epsilon allows."""
    limit, asked = config.privacy.epsilon, config.server.rounds
    first = epsilon_after(config, roster, 1)  # asked for in any case, so that a missing accountant is known at once
    if limit is None:
        return asked
    rounds = bisect_right(range(1, asked + 1), limit, key=lambda count: epsilon_after(config, roster, count) or 0.0)
    if rounds == 0:
        raise InputError(
            f"privacy.epsilon={limit:g} does not allow a single round, whose epsilon is {first:.3g}: "
            f"raise it, or privacy.noise={config.privacy.noise:g}"
        )
    return rounds


KEYWORDS = {
    **{name: option.place for name, option in OPTIONS.items()},
    "momentum": "local.momentum",
    "weight_decay": "local.weight_decay",
    "min_replies": "server.min_replies",
    "latent": "model.latent",
    "layout": "run.layout",
}
"""The setting that a keyword of `train` and `AlgorithmStrategy` stands for."""


BROUGHT = ("data", "partition", "model", "algorithm")
"""Sections that say nothing to a caller who brings data, encoder and algorithm."""


def own_config(
    algorithm: Algorithm | type[Algorithm] | str | Path, set: Assignments = (), **keywords: Any
) -> tuple[Config, Algorithm]:
    """Settings and algorithm of a caller who brings data and an encoder; None is as good as not given."""
    name, method = named_algorithm(algorithm)
    own = {section: values for section, values in method.defaults.items() if section != "model"}
    tables = merged({"data": {"name": "own"}}, own)
    for keyword, value in keywords.items():
        if value is not None:
            section, field = KEYWORDS[keyword].split(".")
            tables = merged(tables, {section: {field: value}})
    said = Asked.of({}, set=set).tables()
    if wrong := next((section for section in said if section in BROUGHT), None):
        raise InputError(f"set takes no settings of [{wrong}] here: data, encoder and algorithm are arguments")
    config = config_from(merged(tables, said))
    return replace(config, algorithm=AlgorithmConfig(name, hyper_parameters(method))), method


def hyper_parameters(algorithm: Algorithm) -> dict[str, Any]:
    return {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.init}


def workbench(config: Config, algorithm: Algorithm, task: Task, device: str | None = None) -> Workbench:
    """What a process trains on, for a settled config."""
    modules = algorithm.build(task)
    if config.run.compile:
        for network in modules["model"].children():
            network.compile()  # the parts, since methods call them one by one
    return Workbench(
        algorithm=algorithm,
        modules=modules,
        seed=config.run.seed,
        total_rounds=config.server.rounds,
        num_classes=task.num_classes,
        local=_local(config, algorithm),
        device=torch.device(device or config.run.device),
        precision=getattr(torch, config.run.precision),
        layout=torch.channels_last if config.run.layout == "channels_last" else torch.contiguous_format,
        steady=config.model.batchnorm == "frozen",
        own=own_tensors(config, algorithm, modules["model"]),
        privacy=config.privacy,
        upload=upload_of(config, algorithm),
    )


def _local(config: Config, algorithm: Algorithm) -> LocalConfig:
    """How a client trains; one that holds all data does the work of all active ones."""
    local, active = config.local, config.server.active or 1
    if algorithm.pools == "steps":
        return replace(local, steps=local.steps * active)
    return replace(local, batch_size=local.batch_size * active) if algorithm.pools == "batch" else local


def upload_of(config: Config, algorithm: Algorithm) -> Upload:
    """How clients upload what they train; where all data are in one place, nothing is uploaded."""
    return "float32" if algorithm.pools else config.server.upload


def own_batchnorm(config: Config, algorithm: Algorithm) -> str | None:
    """What leaves each site BatchNorm of its own, if anything; with all data in one place there is one site only."""
    if algorithm.pools or not algorithm.one_model:
        return None
    if algorithm.keeps_batchnorm:
        return config.algorithm.name
    return "model.batchnorm=local" if config.model.batchnorm == "local" else None


def keeps_something(config: Config, algorithm: Algorithm) -> bool:
    """Whether clients keep anything from one round to another."""
    rounds_off = upload_of(config, algorithm) != "float32"
    return bool(algorithm.keeps or algorithm.remembers or own_batchnorm(config, algorithm) or rounds_off)


def own_tensors(config: Config, algorithm: Algorithm, model: nn.Module) -> frozenset[str]:
    """The tensors of the model that stay with each client: whole BatchNorm layers, their statistics, or none."""
    if own_batchnorm(config, algorithm) is None:
        return frozenset()
    if algorithm.keeps_batchnorm:
        return batchnorm_names(model)
    return frozenset(filter(is_statistic, model.state_dict()))


def check_own(config: Config, algorithm: Algorithm, domain: str, trains: bool) -> None:
    """A site's own BatchNorm statistics are those of its training data, and so is a model of its own."""
    what = own_batchnorm(config, algorithm) if algorithm.one_model else config.algorithm.name
    if what and not trains:
        raise InputError(
            f"{what} needs training data at every client, but {domain!r} has none: "
            "it cannot be used with partition.hold_out"
        )
