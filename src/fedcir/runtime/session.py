"""The session of a run: what is fixed, and the state and records that change with each round."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from fedcir.algorithms.algorithm import Algorithm
from fedcir.algorithms.fedcirone import FedCiROne, list_site_keys
from fedcir.client.cost import step_flops
from fedcir.client.head_bank import HeadBank
from fedcir.client.local_update import LocalTrainer, learning_rate
from fedcir.client.masks import MASK_KEY, pack_keys, simulated_key
from fedcir.client.prediction import Hits
from fedcir.client.state import ClientStore, local_tensor_names, upload_format
from fedcir.client.uploads import (
    PrivateMean,
    UploadFormat,
    check_example_privacy,
    check_update_privacy,
    compress_update,
    make_noise,
)
from fedcir.config import HUGGING_FACE, Config, config_to_tables
from fedcir.data.federation import Roster
from fedcir.errors import RunError
from fedcir.files import compute_checksum
from fedcir.models.adapters import select_frozen
from fedcir.models.builder import NetworkBuilder
from fedcir.models.hugging_face import find_folder, read_architecture
from fedcir.models.site_statistics import fit_site_count
from fedcir.models.tensors import hash_tensors, snapshot, to_cpu
from fedcir.rng import numpy_rng, secret_rng, torch_rng
from fedcir.runtime.file_formats import has_stalled, round_to_save
from fedcir.runtime.resolution import resolve_config
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.stored_sums import StoredSums
from fedcir.server.accounting import ReleaseCounter, epsilon_after, get_adjacency, sample_cohort, sample_poisson_cohort
from fedcir.server.aggregation import find_aggregator
from fedcir.server.coalitions import Message, check_sites, solve_heads, standardise_messages
from fedcir.server.replies import NormFilter
from fedcir.types import (
    Aggregator,
    Groups,
    LocalContext,
    Modules,
    RoundRecord,
    ServerContext,
    ServerState,
    Tensors,
    ignore_progress,
)

PRIVACY = "privacy"
"""The server's group that holds the norm it clips to."""

IDENTITY = (
    *(f"privacy.{name}" for name in ("clip", "noise", "unit", "place", "adaptive", "delta")),
    *("local.steps", "local.batch_size", "server.active", "run.seed"),
)
"""Settings that identify a run: a checkpoint and a count of releases belong to one run."""


@dataclass
class Session:
    """A run in progress."""

    config: Config
    algorithm: Algorithm
    modules: Modules
    roster: Roster
    state: ServerState
    records: list[RoundRecord] = field(default_factory=list)
    folder: RunFolder | None = None
    notes: tuple[str, ...] = ()
    """Messages for the user."""
    loading: float = 0.0  # seconds spent on opening the run, counted in its first round
    peak_memory: int = 0  # of all processes of this machine, in bytes
    store: ClientStore = field(default_factory=ClientStore)
    deployed: bool = False
    """Whether clients are sites of other parties, so that noise must not come from the seed."""
    stop_requested: bool = False
    next_state: ServerState | None = None
    """The state that the next round starts from, while it is evaluated."""
    hits: Hits | None = None
    """Result of the last evaluation for each image, if saved."""
    _step_flops: dict[tuple[str, ...], int] = field(default_factory=dict)
    """FLOPs of a local step by the groups that clients receive."""

    @property
    def card(self) -> dict[str, Any]:
        """Metadata of the model: its data, how to build it, and how it was trained. It holds no path."""
        tables = config_to_tables(self.config)
        left_out = ("weights", "start", *(("adapter",) if self.config.model.adapter == "none" else ()))
        model = {name: value for name, value in tables["model"].items() if name not in left_out}
        if (file := self.config.model.file) is not None:
            model["name"] = f"{file.name}:{self.config.model.name.rpartition(':')[2]}"
        if (folder := find_folder(self.config.model)) is not None:
            model |= {"name": HUGGING_FACE, "arguments": read_architecture(folder)}
        method = self.config.algorithm
        about = {"model": model, "algorithm": {"name": Path(method.name).stem, **method.fields}}
        privacy = {} if self.guarantee is None else {"privacy": self.guarantee}
        return {**self.roster.card, **about, "saved": self.saved, **privacy}

    @property
    def model(self) -> Tensors:
        """Tensors of the saved model with those that are frozen; only these if there is no global model."""
        frozen = to_cpu(select_frozen(self.modules["model"]))
        if self.roster.builder.frozen is not None:
            whole = self.algorithm.build(self.roster.builder.whole())["model"]
            trained = self.modules["model"].state_dict()
            frozen = {name: tensor for name, tensor in snapshot(whole).items() if name not in trained}
        return {**frozen, **self._saved_state().shared.get("model", {})}

    @cached_property
    def frozen_hash(self) -> str:
        """Hash of the tensors that never change, which every client must have; empty if there are none."""
        return hash_frozen(self.roster.builder, self.modules)

    @property
    def saved(self) -> dict[str, Any]:
        """Round of the saved model, and the rule that picked it."""
        keep = self.config.server.keep
        return {"round": round_to_save(self.records, keep), "keep": keep}

    def _saved_state(self) -> ServerState:
        round = self.saved["round"]
        if self.folder is None or round in (0, self.state.round):
            return self.state
        state = next((state for state, _ in self.folder.checkpoints() if state.round == round), None)
        if state is None:
            raise RunError(
                f"{self.folder.path}/checkpoint has no whole state of round {round}, whose model must be saved: "
                f"resume it with from_round {round - 1}, which repeats the round"
            )
        return state

    @property
    def guarantee(self) -> dict[str, Any] | None:
        """Differential privacy guarantee so far; None without noise or before the first round."""
        privacy = self.config.privacy
        if not privacy.noise or not self.records:
            return None
        return {
            "epsilon": self.records[-1].epsilon,
            "delta": privacy.delta,
            "unit": privacy.unit,
            "place": "client" if privacy.by_steps else privacy.place,
            "adjacency": get_adjacency(privacy),
            "randomness": "system" if self.deployed else "seed",
        }

    @property
    def finished(self) -> bool:
        server = self.config.server
        return self.state.round >= server.rounds or has_stalled(self.records, server.patience)

    @property
    def has_secret_cohort(self) -> bool:
        """Whether epsilon relies on amplification by sampling, so that only the server may know the cohort."""
        privacy, trainers = self.config.privacy, len(self.roster.trainers)
        return privacy.by_server and privacy.noise > 0 and self.expected_clients < trainers

    @property
    def expected_clients(self) -> int:
        """Mean number of clients that train in a round."""
        return min(self.config.server.active or len(self.roster.trainers), len(self.roster.trainers))

    def expected_flops(self) -> int:
        """Mean FLOPs of the next round, counted on a batch of zeros instead of replies."""
        received = tuple(sorted(self.state.shared))
        if received not in self._step_flops:
            example, local = self.roster.builder.example, self.config.local
            assert example is not None
            shape = example.shape[1:]
            if len(shape) == 3 and "image_size" in self.roster.card:  # the example of built-in networks is smaller
                shape = torch.Size([shape[0], *(self.roster.card["image_size"],) * 2])
            x = torch.zeros(1, *shape, dtype=example.dtype).expand(local.batch_size, *shape)
            y, labels = self.roster.builder.task.example_targets(x), torch.zeros(local.batch_size, dtype=torch.int64)
            ctx, modules = replace(self._local_context(), labels=lambda: labels), copy.deepcopy(self.modules)
            with torch.no_grad():
                self.algorithm.local_start(modules, ctx)
            self._step_flops[received] = step_flops(self.algorithm, modules, x, y, ctx)
        return self._step_flops[received] * self.expected_steps * self.expected_clients

    @property
    def expected_steps(self) -> int:
        """Mean number of local steps of a client in a round, rounded."""
        local, trainers = self.config.local, self.roster.trainers
        if local.epochs is None:
            return local.steps
        return round(sum(local.count_steps(self.roster.images(client)) for client in trainers) / len(trainers))

    def _local_context(self) -> LocalContext:
        """Context of the next round for a client without a state."""
        local, rounds, round = self.config.local, self.config.server.rounds, self.state.round + 1
        return LocalContext(
            round=round,
            total_rounds=rounds,
            num_classes=self.roster.builder.num_classes,
            batch_size=local.batch_size,
            broadcast=self.state.shared,
            rng=torch.Generator(),
            steps=self.expected_steps,
            lr=learning_rate(local, round, rounds),
            momentum=local.momentum,
            loss=self.roster.builder.task.loss,
            loss_name=self.roster.builder.task.loss_name,
            validation=tuple if self.config.data.val_fraction and not self.config.privacy.noise else None,
        )

    def template(self) -> Groups:
        """Groups with the names, shapes and dtypes that a reply must have."""
        with torch.no_grad():
            summary = self.algorithm.local_summary(self.modules, (), self._local_context())
        whole = summary if self.algorithm.one_shot else {**self.evaluation_groups(self.state), **summary}
        if self.upload == "float32":
            return whole
        return compress_update(whole, self.state.shared, {}, self.upload, numpy_rng(0))[0]

    @property
    def upload(self) -> UploadFormat:
        return upload_format(self.config, self.algorithm)

    def screen(self) -> NormFilter:
        """Filter that drops replies of the next round whose update norm is an outlier."""
        trained = [group for group in self.algorithm.trains if group not in self.algorithm.sends]
        # With clipping, whether a reply counts must not depend on other clients' replies.
        is_checked = self.config.privacy.clip is None and not self.algorithm.pools
        factor = self.config.server.max_update if is_checked else 0.0
        return NormFilter(self.state.shared, trained, factor)

    def cohort(self, round: int) -> list[int]:
        """Draw the clients that train in a round, in ascending order."""
        trainers, seed, active = self.roster.trainers, self.config.run.seed, self.expected_clients
        if self.config.privacy.by_server and active < len(trainers):
            rng = secret_rng() if self.deployed else numpy_rng(seed, "poisson", round)
            return sample_poisson_cohort(trainers, active / len(trainers), rng)
        return sample_cohort(trainers, active, seed, round, self.roster.absent)

    def next_cohort(self) -> list[int] | None:
        """Draw the next round's clients while its state is evaluated, so that they can do both at once.

        None after the last round, which with patience any may be, and with privacy, where a repeated round costs more
        and the draw is not repeatable.
        """
        server = self.config.server
        if self.next_state is None or self.next_state.round >= server.rounds or server.patience is not None:
            return None
        return self.cohort(self.next_state.round + 1) if self.config.privacy.clip is None else None

    def private_mean(self) -> PrivateMean | None:
        """Aggregation of the next round with clipping and noise; None if the server adds none."""
        privacy, round = self.config.privacy, self.state.round + 1
        if privacy.clip is None or not privacy.by_server:
            return None
        clip = self.state.private[PRIVACY]["clip"] if PRIVACY in self.state.private else privacy.clip
        rng = secret_rng() if self.deployed else numpy_rng(self.config.run.seed, PRIVACY, round)
        return PrivateMean(privacy, float(clip), self.expected_clients, rng)

    def mask_keys(self, cohort: Sequence[int]) -> Tensors:
        """The public keys of a cohort, as a group of the broadcast."""
        if not self.deployed:
            private = {client: simulated_key(self.config.run.seed, client) for client in cohort}
            return pack_keys({client: key.public_key().public_bytes_raw() for client, key in private.items()})
        clients = {client["id"]: client for client in self.roster.manifest["clients"]}
        return pack_keys({client: bytes.fromhex(clients[client][MASK_KEY]) for client in cohort})

    def epsilon_after(self, rounds: int, repeated: int) -> float | None:
        return epsilon_after(self.config, self.roster, rounds, repeated, self.algorithm.one_shot)

    def spend_epsilon(self) -> float | None:
        """Count the next round before it begins and return its epsilon; raise RunError above privacy.epsilon."""
        round, limit = self.state.round + 1, self.config.privacy.epsilon
        epsilon = self.epsilon_after(round, self.count_repeated(self.state.round))
        if limit is not None and epsilon is not None and epsilon > limit:
            over = f"above privacy.epsilon={limit:g}: raise it to go on"
            raise RunError(f"round {round} would bring epsilon to {epsilon:.3g}, {over}")
        if epsilon is not None and (releases := self.releases) is not None:
            releases.add()
        return epsilon

    @property
    def releases(self) -> ReleaseCounter | None:
        """Counter of the rounds that a deployment with noise has begun."""
        if not self.deployed or self.folder is None or not self.config.privacy.noise:
            return None
        return ReleaseCounter(self.folder.path / "releases", self.identity)

    def count_repeated(self, round: int) -> int:
        """Count the rounds that a deployment has begun after its first `round` rounds."""
        releases = self.releases
        return 0 if releases is None or not releases.path.exists() else max(0, releases.count() - round)

    @property
    def identity(self) -> str:
        """Checksum of the data and of the settings in IDENTITY; a resumed run has the same."""
        tables, manifest = config_to_tables(self.config), self.roster.manifest
        settings = {key: tables[key.split(".")[0]].get(key.split(".")[1]) for key in IDENTITY}
        method = Path(self.config.algorithm.name).stem
        return compute_checksum([settings, method, manifest["hash"], manifest.get("key")])

    @property
    def stored_sums(self) -> StoredSums | None:
        """Where the sums of single clients are stored; None if they are not."""
        has_place = self.config.server.store_sums and self.folder is not None
        return StoredSums(self.folder.path) if has_place and self.folder is not None else None

    def solve_coalitions(self, state: ServerState, sums: Mapping[int, Callable[[], Tensors]]) -> HeadBank:
        """Solve the heads of all coalitions of clients, from functions that load the sums of each."""
        assert isinstance(self.algorithm, FedCiROne)
        model = self.modules["model"]
        fit_site_count(model, state.shared["model"])
        model.load_state_dict(state.shared["model"])
        check_sites(len(sums), len(model.encoder.mean))
        domains = {client: self._find_domain(client) for client in sums}
        messages = (
            Message(domains[client], load(), list_site_keys(domains[client], client)) for client, load in sums.items()
        )
        return solve_heads(standardise_messages(self.algorithm, model.encoder, messages), ignore_progress)

    def _find_domain(self, client: int) -> str:
        clients = self.roster.manifest["clients"]
        if client >= len(clients) or clients[client]["id"] != client:  # sites need not hold all partitions
            return str(next(entry["domain"] for entry in clients if entry["id"] == client))
        return str(clients[client]["domain"])

    def make_trainer(self, device: str | None = None) -> LocalTrainer:
        return make_trainer(self.config, self.algorithm, self.roster.builder, device)

    def evaluation_groups(self, state: ServerState) -> Groups:
        """Groups of a state that clients need for an evaluation."""
        return {name: state.shared[name] for name in self.algorithm.trains}

    @cached_property
    def _aggregator_class(self) -> type[Aggregator]:
        return find_aggregator(self.config.server.aggregation)

    def context(self, round: int) -> ServerContext:
        rng = torch_rng(self.config.run.seed, "server", round)
        server, batch = self.config.server, self.config.local.batch_size
        norm = self.config.model.batchnorm
        classes, clients = self.roster.builder.num_classes, len(self.roster.trainers)
        return ServerContext(
            *(round, server.rounds, classes, batch, server.weighting, norm, rng, clients),
            broadcast=self.state.shared,
            domain_of=self._find_domain,
            noise=make_noise(self.config.privacy),
            count_steps=self.config.local.count_steps,
            momentum=self.config.local.momentum,
            make_aggregator=None if self.algorithm.pools else partial(self._aggregator_class, settings=server),
        )


def hash_frozen(builder: NetworkBuilder, modules: Modules) -> str:
    """Hash the tensors of a run's network that never change: a frozen encoder's, or its frozen parts'."""
    frozen = select_frozen(modules["model"]) if builder.frozen is None else builder.frozen.state_dict()
    return hash_tensors(to_cpu(frozen)) if frozen else ""


def open_session(config: Config, algorithm: Algorithm, roster: Roster) -> Session:
    """Open a run before its first round: resolve the config and build the networks."""
    resolved = resolve_config(config, algorithm, roster)
    modules = algorithm.build(roster.builder)
    session = Session(resolved, algorithm, modules, roster, ServerState(0, {}), notes=roster.notes)
    state = algorithm.start(modules, session.context(0))
    unsent = local_tensor_names(config, algorithm, modules["model"]) | select_frozen(modules["model"]).keys()
    model = {name: tensor for name, tensor in state.shared.get("model", {}).items() if name not in unsent}
    session.state = replace(state, shared={**state.shared, "model": model} if "model" in state.shared else state.shared)
    check_update_privacy(session.config, algorithm, session.evaluation_groups(session.state))
    if config.privacy.by_steps:
        check_example_privacy(session.config, algorithm, roster.builder.task, modules["model"])
    rounds, limit = session.config.server.rounds, config.privacy.epsilon
    if limit is not None and rounds < config.server.rounds:
        note = (
            f"privacy.epsilon={limit:g} is used up after {rounds} of {config.server.rounds} rounds: the run ends there"
        )
        session.notes = (*session.notes, note)
    return session


def make_trainer(
    config: Config, algorithm: Algorithm, builder: NetworkBuilder, device: str | None = None
) -> LocalTrainer:
    """Make the trainer of a process for a resolved config."""
    modules = algorithm.build(builder)
    local, active = config.local, config.server.active or 1
    if algorithm.pools == "steps":  # a client that pools all data does the work of all active clients
        local = replace(local, steps=local.steps * active)
    elif algorithm.pools == "batch":
        local = replace(local, batch_size=local.batch_size * active)
    if config.run.compile:
        for network in modules["model"].children():
            network.compile()  # each part, since algorithms call them separately
    return LocalTrainer(
        algorithm=algorithm,
        modules=modules,
        seed=config.run.seed,
        total_rounds=config.server.rounds,
        task=builder.task,
        local=local,
        device=torch.device(device or config.run.device),
        precision=getattr(torch, config.run.precision),
        layout=torch.channels_last if config.run.layout == "channels_last" else torch.contiguous_format,
        freeze_batchnorm=config.model.batchnorm == "frozen",
        always_calibrates=config.server.keep == "best",
        may_stop=config.server.patience is not None,
        has_validation=config.data.val_fraction > 0 and not config.privacy.noise,
        local_names=local_tensor_names(config, algorithm, modules["model"]),
        privacy=config.privacy,
        upload=upload_format(config, algorithm),
    )
