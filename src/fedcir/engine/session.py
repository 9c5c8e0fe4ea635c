"""A run under way, and the one way to open it: from a config and a roster, whatever carries the messages."""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import (
    Config,
    LocalConfig,
    config_tables,
)
from fedcir.data.federation import Roster
from fedcir.engine.accounting import Releases, adjacency_of
from fedcir.engine.best import round_to_save
from fedcir.engine.client import Workbench, learning_rate
from fedcir.engine.cohort import epsilon_after, poisson_cohort, sample_cohort
from fedcir.engine.cost import step_flops
from fedcir.engine.dpsgd import check_examples
from fedcir.engine.files import checksum
from fedcir.engine.folder import RunFolder
from fedcir.engine.hits import Hits
from fedcir.engine.norms import Screen
from fedcir.engine.own import own_tensors, upload_of
from fedcir.engine.privacy import PrivateMean, check_private
from fedcir.engine.settling import settled
from fedcir.engine.store import ClientStore
from fedcir.engine.uploads import Upload, encoded
from fedcir.models.task import Task
from fedcir.models.tensors import snapshot
from fedcir.rng import numpy_rng, secret_rng, torch_rng
from fedcir.types import (
    Arrays,
    Groups,
    LocalContext,
    Modules,
    RoundRecord,
    RunError,
    ServerContext,
    ServerState,
)

PRIVACY = "privacy"
"""The server's group that holds the norm it clips to."""

IDENTITY = (
    *(f"privacy.{name}" for name in ("clip", "noise", "unit", "place", "adaptive", "delta")),
    *("local.steps", "local.batch_size", "server.active", "run.seed"),
)
"""Settings that a run is known by: a checkpoint and a count of releases belong to one run."""


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
    stop_requested: bool = False
    """Whether the run ends after this round, as if it were the last."""
    coming: ServerState | None = None
    """The state that the next round starts from, while it is tested."""
    hits: Hits | None = None
    """Results of the last test image by image, where they are kept."""
    _step_flops: dict[tuple[str, ...], int] = field(default_factory=dict)
    """FLOPs of a local step by the groups that clients receive."""

    @property
    def card(self) -> dict[str, Any]:
        """What a user of the model must know, and what it takes to build it again; no path, as equal runs are equal."""
        model = {name: value for name, value in config_tables(self.config)["model"].items() if name != "weights"}
        if (file := self.config.model.file) is not None:
            model["name"] = f"{file.name}:{self.config.model.name.rpartition(':')[2]}"
        method = self.config.algorithm
        about = {"model": model, "algorithm": {"name": Path(method.name).stem, **method.fields}}
        guarantee = self.guarantee
        return {
            **self.roster.card,
            **about,
            "saved": self.saved,
            **({} if guarantee is None else {"privacy": guarantee}),
        }

    @property
    def model(self) -> Arrays:
        """The tensors of the model that is saved, a frozen encoder's too; none where each client keeps its own."""
        return {**self._frozen(), **self._saved_state().shared.get("model", {})}

    @property
    def saved(self) -> dict[str, Any]:
        """Which round's model is saved, and why."""
        keep = self.config.server.keep
        return {"round": round_to_save(self.records, keep), "keep": keep}

    def _saved_state(self) -> ServerState:
        round = self.saved["round"]
        if self.folder is None or round in (0, self.state.round):
            return self.state
        state = next((state for state, _ in self.folder.states() if state.round == round), None)
        if state is None:
            raise RunError(
                f"{self.folder.path}/checkpoint has no whole state of round {round}, whose model is to be saved: "
                f"resume it with from_round {round - 1}, which repeats the round"
            )
        return state

    def _frozen(self) -> Arrays:
        """What the whole model has beside what clients train."""
        if self.roster.task.frozen is None:
            return {}
        whole, trained = self.algorithm.build(self.roster.task.whole())["model"], self.modules["model"].state_dict()
        return {name: tensor for name, tensor in snapshot(whole).items() if name not in trained}

    @property
    def guarantee(self) -> dict[str, Any] | None:
        """What differential privacy of the rounds so far says; None without noise, or before the first round."""
        privacy = self.config.privacy
        if not privacy.noise or not self.records:
            return None
        return {
            "epsilon": self.records[-1].epsilon,
            "delta": privacy.delta,
            "unit": privacy.unit,
            "place": "client" if privacy.by_steps else privacy.place,
            "adjacency": adjacency_of(privacy),
            "randomness": "system" if self.deployed else "seed",
        }

    @property
    def finished(self) -> bool:
        return self.state.round >= self.config.server.rounds

    @property
    def has_secret_cohort(self) -> bool:
        """Whether epsilon relies on nobody but the server knowing who trains in a round (amplification by sampling)."""
        privacy, trainers = self.config.privacy, len(self.roster.trainers)
        return privacy.by_server and privacy.noise > 0 and self.expected_clients < trainers

    @property
    def expected_clients(self) -> int:
        """Clients that train in a round, on average."""
        return min(self.config.server.active or len(self.roster.trainers), len(self.roster.trainers))

    def expected_flops(self) -> int:
        """FLOPs of the coming round on average, counted here on an empty batch, without any reply."""
        received = tuple(sorted(self.state.shared))
        if received not in self._step_flops:
            example, local = self.roster.task.example, self.config.local
            assert example is not None
            shape = example.shape[1:]
            if len(shape) == 3 and "image_size" in self.roster.card:  # the example of our own networks is smaller
                shape = torch.Size([shape[0], *(self.roster.card["image_size"],) * 2])
            x = torch.zeros(1, *shape, dtype=example.dtype).expand(local.batch_size, *shape)
            y = torch.zeros(local.batch_size, dtype=torch.int64)
            ctx, modules = replace(self._local_context(), labels=lambda: y), copy.deepcopy(self.modules)
            with torch.no_grad():
                self.algorithm.local_start(modules, ctx)
            self._step_flops[received] = step_flops(self.algorithm, modules, x, y, ctx)
        return self._step_flops[received] * self.config.local.steps * self.expected_clients

    def _local_context(self) -> LocalContext:
        """What a client that has kept nothing knows in the coming round."""
        local, rounds, round = self.config.local, self.config.server.rounds, self.state.round + 1
        return LocalContext(
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

    def template(self) -> Groups:
        """What a reply must look like: names, shapes and dtypes."""
        with torch.no_grad():
            summary = self.algorithm.local_summary(self.modules, (), self._local_context())
        whole = {**self.to_test(self.state), **summary}
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
        trainers, seed, active = self.roster.trainers, self.config.run.seed, self.expected_clients
        if self.config.privacy.by_server and active < len(trainers):
            rng = secret_rng() if self.deployed else numpy_rng(seed, "poisson", round)
            return poisson_cohort(trainers, active / len(trainers), rng)
        return sample_cohort(trainers, active, seed, round)

    def following(self) -> list[int] | None:
        """The clients that will train on the state that is tested now, if they may do both at once.

        Not after the last round; nor under privacy, where a round that is repeated after a crash costs more, and
        chance that nobody can repeat draws the clients.
        """
        if self.coming is None or self.coming.round >= self.config.server.rounds:
            return None
        return self.cohort(self.coming.round + 1) if self.config.privacy.clip is None else None

    def private_mean(self) -> PrivateMean | None:
        """What the server makes of the coming round's replies, if it is to protect them."""
        privacy, round = self.config.privacy, self.state.round + 1
        if privacy.clip is None or not privacy.by_server:
            return None
        clip = self.state.private[PRIVACY]["clip"] if PRIVACY in self.state.private else privacy.clip
        rng = secret_rng() if self.deployed else numpy_rng(self.config.run.seed, PRIVACY, round)
        return PrivateMean(privacy, float(clip), self.expected_clients, rng)

    def spend(self) -> float | None:
        """Count the coming round before any of it leaves a client, unless privacy.epsilon forbids it; gives epsilon."""
        round, limit = self.state.round + 1, self.config.privacy.epsilon
        epsilon = epsilon_after(self.config, self.roster, round, self.repeated(self.state.round))
        if limit is not None and epsilon is not None and epsilon > limit:
            raise RunError(
                f"round {round} would bring epsilon to {epsilon:.3g}, above privacy.epsilon={limit:g}: "
                "raise it to go on"
            )
        if epsilon is not None and (releases := self.releases) is not None:
            releases.add()
        return epsilon

    @property
    def releases(self) -> Releases | None:
        """Count of the rounds that a deployment with noise has begun."""
        if not self.deployed or self.folder is None or not self.config.privacy.noise:
            return None
        return Releases(self.folder.path / "releases", self.identity)

    def repeated(self, round: int) -> int:
        """Rounds that a deployment has begun beyond the first `round` ones."""
        releases = self.releases
        return 0 if releases is None or not releases.path.exists() else max(0, releases.count() - round)

    @property
    def identity(self) -> str:
        """Checksum of the data and of the settings that epsilon and the draws depend on, equal in every resume."""
        tables, manifest = config_tables(self.config), self.roster.manifest
        settings = {key: tables[key.split(".")[0]].get(key.split(".")[1]) for key in IDENTITY}
        method = Path(self.config.algorithm.name).stem
        return checksum([settings, method, manifest["hash"], manifest.get("key")])

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
        calibrates_always=config.server.keep == "best",
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
