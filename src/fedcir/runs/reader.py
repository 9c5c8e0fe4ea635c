"""A saved run as a value: config, manifest, records, summary and model."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcir.algorithms import list_algorithms, resolve_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.client.client_requests import load_for_evaluation
from fedcir.client.local_update import LOCAL, LocalTrainer, get_local_tensors
from fedcir.client.prediction import Hits
from fedcir.client.state import ClientStore
from fedcir.config import HUGGING_FACE, Config, ModelConfig
from fedcir.data.federation import Client
from fedcir.errors import InputError, suggest_name
from fedcir.files import RESTORE_HINT
from fedcir.models.adapters import load_trained, merge_adapters
from fedcir.models.builder import NetworkBuilder, make_array_builder, make_image_builder
from fedcir.models.hugging_face import add_pooling
from fedcir.models.site_statistics import fit_site_count
from fedcir.models.tensors import HEAD, batchnorm_names, find_mismatch, find_non_finite
from fedcir.runtime.file_formats import read_metric
from fedcir.runtime.resume import use_saved_algorithm, use_saved_model
from fedcir.runtime.run_folder import REWRITE_HINT, SUMS, SUMS_HINT, RunFolder
from fedcir.runtime.session import make_trainer
from fedcir.tasks.classification import read_task
from fedcir.tasks.task import Sums, Task
from fedcir.types import Groups, LocalContext, Metric, RoundRecord, ServerState, Tensors
from fedcir.validation import build_dataclass

NESTED = ("losses", "scores", "validation", "risk", "seconds")
"""Fields of a record that hold several numbers by name."""
OTHER = (*NESTED, "dropped", "unseen", "metrics", "metric")
PLAIN = (*(f.name for f in fields(RoundRecord) if f.name not in OTHER), "risk_mean")


@dataclass(frozen=True)
class Run:
    """A run at the time it was read. One that is still training has the rounds so far."""

    path: Path
    config: Config
    manifest: dict[str, Any]
    records: tuple[RoundRecord, ...]
    summary: dict[str, Any] | None
    """None until the run is finished."""
    trust_code: bool = False
    """Whether custom code that the settings name may be executed."""

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @cached_property
    def card(self) -> dict[str, Any]:
        """Metadata of the model: classes, image size, normalisation, network and algorithm."""
        return RunFolder(self.path).card()

    @cached_property
    def task(self) -> Task:
        """What the run predicts. The names of classes are known once it is finished."""
        card = self.card if self.finished else {"classes": (), **self.manifest}
        return read_task(card, self.path if self.trust_code else None)

    @cached_property
    def hits(self) -> Hits | None:
        """Result of the last evaluation for each image; None if not saved, as across sites."""
        return RunFolder(self.path).hits()

    @cached_property
    def sums(self) -> dict[str, Sums]:
        """Sums of the last evaluation by domain, from which the task computes its metrics; empty for classification."""
        sums = RunFolder(self.path).sums()
        for domain, parts in sums.items():
            if (fault := self.task.find_sums_fault(parts)) is not None:
                raise InputError(f"{self.path / SUMS} does not belong to this run: of {domain}, {fault}; {SUMS_HINT}")
        return sums

    @property
    def final(self) -> dict[str, Any]:
        """Scores of the last round, by their names in summary.json."""
        if self.summary is None:
            raise InputError(f"{self.path} holds no finished run: resume it to finish it")
        if self.summary["final"] is None:
            reason = f"no client had test examples, or none had those that define the {self.metric.title}"
            raise InputError(f"{self.path} has no score: {reason}")
        final: dict[str, Any] = self.summary["final"]
        return final

    @property
    def metric(self) -> Metric:
        """Primary metric of the run's task, by which runs are compared."""
        return self.records[-1].metric if self.records else read_metric(self.summary or {})

    @property
    def scores(self) -> dict[str, Any]:
        """Scores of the last round, by the fields of RoundRecord."""
        return self.metric.to_fields(self.final)

    @property
    def test_images(self) -> dict[str, int]:
        """Number of test images by domain; empty if unknown."""
        if (names := self.manifest.get("test")) is not None:
            return {domain: len(ids) for domain, ids in names.items()}
        clients = self.manifest.get("clients", ())  # across sites, the first client of a domain holds its test set
        return {client["domain"]: client["test"] for client in reversed(clients) if isinstance(client.get("test"), int)}

    @property
    def saved_round(self) -> int:
        """Round of the saved model."""
        return int((self.summary or {}).get("saved", {}).get("round", len(self.records)))

    @property
    def saved_scores(self) -> dict[str, Any]:
        """Scores of the saved model, by their names in summary.json; empty if no client evaluates."""
        summary = self.summary or {}
        key = "best" if summary.get("saved", {}).get("keep") == "best" else "final"
        name = self.metric.name_in_files
        return summary.get(key) or {name("scores"): {}, name("score_mean"): None}

    @property
    def saved_accuracies(self) -> dict[str, Any]:
        """Former name of `saved_scores`, for one version."""
        return self.saved_scores

    @property
    def peak_memory(self) -> int:
        """Peak memory of all processes of the machine in bytes; 0 until the run is finished."""
        return 0 if self.summary is None else int(self.summary["cost"].get("peak_memory", 0))

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Rounds and values of a number, to plot: `plt.plot(*run.curve("accuracy_mean"))`.

        Names are the columns of `to_rows`, such as "bytes_up", "accuracy/photo" or "losses/total". Rounds without the
        value are left out.
        """
        rows, names = self.to_rows(), map(self.metric.name_in_files, PLAIN)
        columns = rows[0] if rows else (*names, "dropped", name)  # before the first round the columns are unknown
        if name not in columns:
            raise InputError(f"there is no number {name!r} in the rounds of {self.path}; {suggest_name(name, columns)}")
        points = [(row["round"], row[name]) for row in rows if row[name] is not None]
        return [round for round, _ in points], [value for _, value in points]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a dict of numbers for each round, for a table: `pandas.DataFrame(run.to_rows())`.

        All have the same keys; missing values are None.
        """
        rows = [_flatten_record(record) for record in self.records]
        columns = dict.fromkeys(key for row in rows for key in row)
        return [{key: row.get(key) for key in columns} for row in rows]

    def model(
        self,
        *,
        domain: str | None = None,
        algorithm: Algorithm | type[Algorithm] | str | Path | None = None,
        encoder: nn.Module | None = None,
    ) -> nn.Module:
        """Build the trained network in evaluation mode from the model card, without any data.

        Adapters are added into the weights that they change. Where BatchNorm (FedBN), the head (FedRep) or a whole
        model (FedProto, Ditto) stays on the clients, those of the first client of `domain` are loaded. A run of a
        custom algorithm needs it as `algorithm`: an instance, its class, or its file. A run of fedcir.train needs an
        `encoder` like the original one. A run whose model is a
        callable of another package or file must be loaded with `trust_code`.
        """
        arrays, method = self.weights(), self.configured_method(algorithm)
        if domain is not None:
            arrays |= self._local_tensors(domain)
        elif not method.one_model:
            example = f"run.model(domain={self.manifest['clients'][0]['domain']!r})"
            raise InputError(f"{self.path} has no model for all clients: name a domain, as in {example}")
        network: nn.Module = method.build(self.builder(arrays, encoder))["model"]
        network.load_state_dict(self.check_tensors(network, arrays))
        return merge_adapters(network.eval())

    def weights(self) -> Tensors:
        """Tensors of the saved model."""
        return RunFolder(self.path).weights()

    def check_tensors(self, network: nn.Module, arrays: Tensors) -> Tensors:
        """Check that tensors fit a network and are finite, and return them."""
        fit_site_count(network, arrays)
        expected = network.state_dict()
        missing = expected.keys() - arrays.keys()
        if missing and missing <= batchnorm_names(network) | HEAD:
            cause = self.config.algorithm.name if self.config.model.batchnorm != "local" else "model.batchnorm=local"
            has_clients = (self.path / "clients").is_dir()  # and not at sites elsewhere
            hint = f", as in run.model(domain={self.manifest['clients'][0]['domain']!r})" if has_clients else ""
            lacks = f"{self.path}/model.safetensors lacks {min(missing)}"
            raise InputError(f"{lacks}: with {cause} each client keeps its own{hint}")
        if fault := find_mismatch({"model": arrays}, {"model": dict(expected)}):
            raise InputError(f"{self.path}/model.safetensors does not belong to this run: {fault}; {REWRITE_HINT}")
        if (name := find_non_finite({"model": arrays})) is not None:
            raise InputError(f"{self.path}/model.safetensors is no model: {name} is not finite; {REWRITE_HINT}")
        return arrays

    def state(self) -> ServerState | None:
        """Server state after the round of the saved model; None if it has no undamaged checkpoint."""
        states = RunFolder(self.path).checkpoints()
        return next((state for state, _ in states if state.round == self.saved_round), None)

    def _local_tensors(self, domain: str) -> Tensors:
        """Model tensors that stay on the first client of a domain."""
        first = {client["domain"]: client["id"] for client in reversed(self.manifest["clients"])}
        if domain not in first:
            raise InputError(f"no domain {domain!r} in {self.path}; {suggest_name(domain, first)}")
        return get_local_tensors(ClientStore(self.path / "clients").load(first[domain], self.saved_round + 1))

    def configured_method(self, algorithm: Algorithm | type[Algorithm] | str | Path | None = None) -> Algorithm:
        """The algorithm of the run with its hyper-parameters."""
        values = {name: value for name, value in self.card["algorithm"].items() if name != "name"}
        method = self.method(algorithm)
        return method if isinstance(algorithm, Algorithm) else build_dataclass(type(method), values, "algorithm")

    def method(self, algorithm: Algorithm | type[Algorithm] | str | Path | None = None) -> Algorithm:
        """The algorithm of the run with default hyper-parameters. A custom one must be passed or trusted."""
        name = self.config.algorithm.name
        if algorithm is None and name not in list_algorithms() and not (self.trust_code and name.endswith(".py")):
            raise InputError(
                f"{self.path} was trained by {name}, which is not part of fedcir: pass it, as in "
                "run.model(algorithm='./mine.py'), or set trust_code to run the copy that the folder holds"
            )
        if algorithm is None:
            algorithm = use_saved_algorithm(name, self.path, self.trust_code)
        return resolve_algorithm(algorithm)[1]

    def make_builder(self, model: ModelConfig) -> NetworkBuilder:
        """NetworkBuilder of the network as it trained: with a frozen encoder, on its features."""
        card, seed = self.card, self.config.run.seed
        if "shape" in card:
            return make_array_builder(model, self.task, card["shape"], seed)
        return make_image_builder(model, self.task, card["channels"], seed, card["image_size"])

    def builder(self, arrays: Tensors, encoder: nn.Module | None = None) -> NetworkBuilder:
        """NetworkBuilder to build the network of these tensors: on images, or with the caller's encoder."""
        if "channels" in self.card or "shape" in self.card:
            if encoder is not None:
                raise InputError(f"{self.path} has an encoder of its own, {self.config.model.name}: leave encoder out")
            model = build_dataclass(ModelConfig, self.card["model"], "model")
            configured = self.config.model.name
            is_code = model.name != HUGGING_FACE  # trust covers only the model of the settings
            if is_code and Path(model.name).name != Path(configured).name:
                saved = f"{self.path}/model.safetensors is of {model.name}"
                raise InputError(f"{saved}, not of {configured}; {REWRITE_HINT}")
            return self.make_builder(use_saved_model(model, self.path, self.trust_code)).whole()
        if encoder is None:
            fix = "pass one like it, as in run.model(encoder=...)"
            raise InputError(f"{self.path} was trained by fedcir.train with its caller's encoder: {fix}")
        if not isinstance(encoder, nn.Module):
            raise InputError(f"encoder must be an nn.Module, got {encoder!r}")
        copied = add_pooling(copy.deepcopy(encoder).to("cpu", torch.float32))
        gaussian = arrays.get("encoder.gaussian.weight")
        after = ("encoder.gaussian.weight", "encoder.projection.0.weight", "head.weight")
        widest = next((arrays[name] for name in after if name in arrays), None)
        features = 0 if widest is None or widest.ndim != 2 else widest.shape[1]
        latent = features if gaussian is None else len(gaussian) // 2
        builder = NetworkBuilder(self.task, features, latent, self.config.run.seed, lambda: copy.deepcopy(copied))
        return builder.limit(build_dataclass(ModelConfig, self.card["model"], "model"))


def describe_saved_model(summary: Mapping[str, Any]) -> str:
    """Describe in one line which round's model was saved."""
    saved = summary.get("saved", {"round": summary["rounds"], "keep": "last"})
    why = "the best on validation images" if saved["keep"] == "best" else "the last"
    return f"the saved model is that of round {saved['round']}, {why}"


RunSource = Run | RunFolder | str | Path
"""A run or the path of its folder."""


def load_run(path: str | Path, *, trust_code: bool = False) -> Run:
    """Read a run from its folder. A run that is not finished has no summary.

    `trust_code` allows to execute custom code that the run names: the copy in its folder, or a callable of a package.
    """
    folder = RunFolder(Path(path))
    config, manifest, records = folder.config(), folder.manifest(), tuple(folder.records())
    return Run(folder.path, config, manifest, records, folder.summary() if folder.finished else None, trust_code)


def to_run(source: RunSource, trust_code: bool = False) -> Run:
    return source if isinstance(source, Run) else load_run(get_run_path(source), trust_code=trust_code)


def get_run_path(source: RunSource) -> Path:
    return Path(source) if isinstance(source, str | Path) else source.path


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """List the run folders at these paths, each a run or a folder of runs."""
    folders = []
    for path in paths:
        inside = [path] if RunFolder(path).exists else sorted(config.parent for config in path.glob("*/config.toml"))
        if not inside:
            raise InputError(f"{path} holds no run: give a folder that `fedcir run` or `fedcir compare` wrote")
        folders += inside
    return folders


def check_same_data(runs: Sequence[Run], clients: bool = False) -> None:
    """Refuse runs on different data, and with `clients` also runs with different clients or seeds."""
    first = runs[0]
    for run in runs[1:]:
        if first.config.data.name != run.config.data.name:
            differ = f"on different datasets ({first.config.data.name} and {run.config.data.name})"
        elif first.finished and run.finished and first.metric != run.metric:
            differ = f"for different tasks ({first.metric.title} and {run.metric.title})"
        elif first.manifest.get("content") != run.manifest.get("content") and not _differ_by_seed_only(first, run):
            differ = "on different data"
        elif clients and first.manifest.get("hash") != run.manifest.get("hash"):
            differ = "with different clients or seeds"
        else:
            continue
        raise InputError(f"{first.path} and {run.path} ran {differ}: look at each alone")


def _differ_by_seed_only(first: Run, second: Run) -> bool:
    """Check whether runs drew training images with different seeds but share the test images."""
    data, has_other_seed = first.config.data, first.config.run.seed != second.config.run.seed
    is_drawn = data.train_per_domain is not None or data.val_fraction > 0
    return is_drawn and has_other_seed and first.manifest.get("test") == second.manifest.get("test")


def _flatten_record(record: RoundRecord) -> dict[str, Any]:
    """Numbers of a record by name, such as `accuracy_mean`, `accuracy/photo` and the number of dropped clients."""
    to_name = record.metric.name_in_files
    row = {to_name(name): getattr(record, name) for name in PLAIN}
    nested = {to_name(name): getattr(record, name) or {} for name in NESTED} | (record.metrics or {})
    for name, values in nested.items():
        row |= {f"{name}/{key}": value for key, value in values.items()}
    return {**row, "dropped": len(record.dropped)}


@dataclass(frozen=True)
class RestoredModel:
    """Networks of a finished run, and what is loaded into them for each client."""

    trainer: LocalTrainer
    received: Groups
    store: ClientStore
    round: int
    """Round of the saved model."""

    def load(self, client: Client) -> LocalContext:
        """Load the networks of a client's evaluation, and return the context for `predict`."""
        state = self.store.load(client.id, self.round + 1)
        received = self.received.get("model", {})
        shared = {name: received[name] for name in self.trainer.local_names if name in received}
        if shared:  # a frozen encoder's BatchNorm
            state = {**state, LOCAL: {**shared, **state.get(LOCAL, {})}}
        return load_for_evaluation(self.trainer, client, self.received, state, self.round)


def restore_model(
    run: Run, config: Config, algorithm: Algorithm, builder: NetworkBuilder, device: str = "cpu"
) -> RestoredModel:
    """Restore the networks of a finished run: on images, or on the features of a frozen encoder."""
    trainer = make_trainer(replace(config, run=replace(config.run, compile=False)), algorithm, builder, device)
    folder = run.path / "clients"
    received: Groups = {}
    if trainer.frozen:
        saved = run.weights()
        load_trained(trainer.modules["model"], {name: saved[name] for name in trainer.frozen.keys() & saved.keys()})
    if algorithm.one_model:
        model, weights = trainer.modules["model"], run.weights()
        tensors = model.state_dict()
        if builder.frozen is not None:
            weights = {name: tensor for name, tensor in weights.items() if name in tensors}
        local_tensors = {name: tensors[name] for name in trainer.local_names if folder.is_dir()}
        run.check_tensors(model, {**local_tensors, **weights})
        received["model"] = weights
    elif not folder.is_dir():
        raise InputError(f"each client of {run.path} keeps a model of its own, and none is here: use it where they lie")
    if missing := [name for name in algorithm.trains if name not in received]:
        state = run.state()
        for name in missing:
            if state is None or name not in state.shared:
                raise InputError(f"{run.path}/checkpoint lacks {name}, which the run needs to predict; {RESTORE_HINT}")
            received[name] = state.shared[name]
    return RestoredModel(trainer, received, ClientStore(folder), run.saved_round)
