"""A run as a value: everything that its folder holds, read once."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcir.algorithms import named_algorithm, names
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config, ModelConfig, build, nearest
from fedcir.engine.client import own_part
from fedcir.engine.folder import REWRITE, RunFolder
from fedcir.engine.hits import Hits
from fedcir.engine.store import ClientStore
from fedcir.engine.trust import trusted_algorithm, trusted_model
from fedcir.models.task import Task, image_task
from fedcir.models.tensors import batchnorm_names, difference, not_finite
from fedcir.types import Arrays, InputError, RoundRecord, ServerState

NESTED = ("losses", "accuracy", "validation", "risk", "seconds")
"""What a round has several numbers of, by name."""
PLAIN = (*(f.name for f in fields(RoundRecord) if f.name not in (*NESTED, "dropped", "unseen")), "risk_mean")


@dataclass(frozen=True)
class Run:
    """A run as it was when it was read. One that is still training has the rounds that were done by then."""

    path: Path
    config: Config
    manifest: dict[str, Any]
    records: tuple[RoundRecord, ...]
    summary: dict[str, Any] | None
    """None until the run is finished."""
    trust_code: bool = False
    """Whether code that its settings name may run, which its author chose."""

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @cached_property
    def card(self) -> dict[str, Any]:
        """What a user of its model must know: classes, image size, normalisation, network and algorithm."""
        return RunFolder(self.path).card()

    @cached_property
    def hits(self) -> Hits | None:
        """Results of its last test image by image; None where they were not kept, as across sites."""
        return RunFolder(self.path).hits()

    @property
    def final(self) -> dict[str, Any]:
        """The accuracies of its last round."""
        if self.summary is None:
            raise InputError(f"{self.path} holds no finished run: resume it to finish it")
        if self.summary["final"] is None:
            raise InputError(f"{self.path} was never tested, because no client had a test Dataset")
        found: dict[str, Any] = self.summary["final"]
        return found

    @property
    def saved_round(self) -> int:
        """The round whose model it saved."""
        return int((self.summary or {}).get("saved", {}).get("round", len(self.records)))

    @property
    def saved_accuracies(self) -> dict[str, Any]:
        """The accuracies of the model that it saved; none where nobody tests."""
        summary = self.summary or {}
        kept = "best" if summary.get("saved", {}).get("keep") == "best" else "final"
        return summary.get(kept) or {"accuracy": {}, "accuracy_mean": None}

    @property
    def peak_memory(self) -> int:
        """Bytes that all processes of the machine held at most; 0 until it is finished."""
        return 0 if self.summary is None else int(self.summary["cost"].get("peak_memory", 0))

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Rounds and values of a number, to plot: `plt.plot(*run.curve("accuracy_mean"))`.

        Names are the columns of `to_rows`, such as "bytes_up", "accuracy/photo" or "losses/total". Rounds without the
        value are left out.
        """
        rows = self.to_rows()
        known = rows[0] if rows else (*PLAIN, "dropped", name)  # before its first round, nobody knows what it will have
        if name not in known:
            raise InputError(f"there is no number {name!r} in the rounds of {self.path}; {nearest(name, known)}")
        points = [(row["round"], row[name]) for row in rows if row[name] is not None]
        return [round for round, _ in points], [value for _, value in points]

    def to_rows(self) -> list[dict[str, Any]]:
        """A plain dict of numbers for each round, to make a table of: `pandas.DataFrame(run.to_rows())`.

        All have the same keys; None stands where a round has no value.
        """
        rows = [_flat(record) for record in self.records]
        columns = dict.fromkeys(key for row in rows for key in row)
        return [{key: row.get(key) for key in columns} for row in rows]

    def model(
        self,
        *,
        domain: str | None = None,
        algorithm: Algorithm | type[Algorithm] | str | Path | None = None,
        encoder: nn.Module | None = None,
    ) -> nn.Module:
        """The trained network in evaluation mode, made from the model card. It takes no data.

        Where each client has BatchNorm (FedBN) or a whole model (FedProto) of its own, `domain` says whose to take:
        that of the first client of the domain.
        A run of an algorithm of your own needs it as `algorithm`: an instance, its class, or its file. A run of
        fedcir.train needs an `encoder` like the one that it was given. A run whose model is a callable of another
        package or file must be loaded with `trust_code`.
        """
        arrays, method = self.weights(), self.configured_method(algorithm)
        if domain is not None:
            arrays |= self._own(domain)
        elif not method.one_model:
            raise InputError(
                f"{self.path} has no model for all clients: name a domain, "
                f"as in run.model(domain={self.manifest['clients'][0]['domain']!r})"
            )
        network = method.build(self.task(arrays, encoder))["model"]
        network.load_state_dict(self.fitting(network, arrays))
        return network.eval()

    def weights(self) -> Arrays:
        """The tensors of the model that it came to."""
        return RunFolder(self.path).weights()

    def fitting(self, network: nn.Module, arrays: Arrays) -> Arrays:
        """These tensors, which must be those that the network has."""
        own = network.state_dict()
        missing = own.keys() - arrays.keys()
        if missing and missing <= batchnorm_names(network):
            what = self.config.algorithm.name if self.config.model.batchnorm != "local" else "model.batchnorm=local"
            here = (self.path / "clients").is_dir()  # and not at sites elsewhere
            hint = f", as in run.model(domain={self.manifest['clients'][0]['domain']!r})" if here else ""
            raise InputError(
                f"{self.path}/model.safetensors lacks {min(missing)}: with {what} each client keeps its own{hint}"
            )
        if fault := difference({"model": arrays}, {"model": dict(own)}):
            raise InputError(f"{self.path}/model.safetensors does not belong to this run: {fault}; {REWRITE}")
        if (name := not_finite({"model": arrays})) is not None:
            raise InputError(f"{self.path}/model.safetensors is no model: {name} is not finite; {REWRITE}")
        return arrays

    def state(self) -> ServerState | None:
        """What the server held after the round whose model it saved; None if no checkpoint of it reads back whole."""
        states = RunFolder(self.path).states()
        return next((state for state, _ in states if state.round == self.saved_round), None)

    def _own(self, domain: str) -> Arrays:
        """What the first client of a domain kept of the model."""
        first = {client["domain"]: client["id"] for client in reversed(self.manifest["clients"])}
        if domain not in first:
            raise InputError(f"no domain {domain!r} in {self.path}; {nearest(domain, first)}")
        return own_part(ClientStore(self.path / "clients").load(first[domain], self.saved_round + 1))

    def configured_method(self, given: Algorithm | type[Algorithm] | str | Path | None = None) -> Algorithm:
        """The method that trained it, with the fields that it had."""
        values = {name: value for name, value in self.card["algorithm"].items() if name != "name"}
        method = self.method(given)
        return method if isinstance(given, Algorithm) else build(type(method), values, "algorithm")

    def method(self, given: Algorithm | type[Algorithm] | str | Path | None = None) -> Algorithm:
        """The method that trained it, with default fields. One that fedcir does not bring is given, or trusted."""
        name = self.config.algorithm.name
        if given is None and name not in names() and not (self.trust_code and name.endswith(".py")):
            raise InputError(
                f"{self.path} was trained by {name}, which is not part of fedcir: pass it, as in "
                "run.model(algorithm='./mine.py'), or set trust_code to run the copy that the folder holds"
            )
        return named_algorithm(trusted_algorithm(name, self.path, self.trust_code) if given is None else given)[1]

    def task(self, arrays: Arrays, encoder: nn.Module | None = None) -> Task:
        """What its network is built from, for these weights: on images, or with the caller's encoder."""
        classes, seed = len(self.card["classes"]), self.config.run.seed
        if "channels" in self.card:
            if encoder is not None:
                raise InputError(f"{self.path} has an encoder of its own, {self.config.model.name}: leave encoder out")
            model = build(ModelConfig, self.card["model"], "model")
            if Path(model.name).name != Path(self.config.model.name).name:  # trust in one is no trust in the other
                raise InputError(
                    f"{self.path}/model.safetensors is of {model.name}, not of {self.config.model.name}; {REWRITE}"
                )
            model = trusted_model(model, self.path, self.trust_code)
            return image_task(model, classes, self.card["channels"], seed, self.card["image_size"]).whole()
        if encoder is None:
            raise InputError(
                f"{self.path} was trained by fedcir.train with its caller's encoder: "
                "pass one like it, as in run.model(encoder=...)"
            )
        if not isinstance(encoder, nn.Module):
            raise InputError(f"encoder must be an nn.Module, got {encoder!r}")
        own = copy.deepcopy(encoder).to("cpu", torch.float32)
        gaussian = arrays.get("encoder.gaussian.weight")
        after = ("encoder.gaussian.weight", "encoder.projection.0.weight", "head.weight")
        widest = next((arrays[name] for name in after if name in arrays), None)
        features = 0 if widest is None or widest.ndim != 2 else widest.shape[1]
        latent = features if gaussian is None else len(gaussian) // 2
        return Task(classes, features, latent, seed, lambda: copy.deepcopy(own))


def describe_saved(summary: Mapping[str, Any]) -> str:
    """Which round's model was saved, as one line."""
    saved = summary.get("saved", {"round": summary["rounds"], "keep": "last"})
    why = "the best on validation images" if saved["keep"] == "best" else "the last"
    return f"the saved model is that of round {saved['round']}, {why}"


Source = Run | RunFolder | str | Path
"""What names a run: itself, or where it lies."""


def load_run(path: str | Path, *, trust_code: bool = False) -> Run:
    """Read a run from its folder. One that is not finished has no summary yet.

    With `trust_code`, code that the run names may run: the copy of a file in its folder, or a callable of a package.
    """
    folder = RunFolder(Path(path))
    config, manifest, records = folder.config(), folder.manifest(), tuple(folder.records())
    return Run(folder.path, config, manifest, records, folder.summary() if folder.finished else None, trust_code)


def as_run(source: Source, trust_code: bool = False) -> Run:
    return source if isinstance(source, Run) else load_run(place_of(source), trust_code=trust_code)


def place_of(source: Source) -> Path:
    return Path(source) if isinstance(source, str | Path) else source.path


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Where the runs at these paths lie, each a run or a folder of runs."""
    found = []
    for path in paths:
        inside = [path] if RunFolder(path).exists else sorted(each.parent for each in path.glob("*/config.toml"))
        if not inside:
            raise InputError(f"{path} holds no run: give a folder that `fedcir run` or `fedcir compare` wrote")
        found += inside
    return found


def same_data(runs: Sequence[Run], clients: bool = False) -> None:
    """Refuse to set runs on different data side by side; if asked, also those of different clients or seeds."""
    first = runs[0]
    for other in runs[1:]:
        if first.config.data.name != other.config.data.name:
            differ = f"on different datasets ({first.config.data.name} and {other.config.data.name})"
        elif first.manifest.get("content") != other.manifest.get("content") and not _drawn_anew(first, other):
            differ = "on different data"
        elif clients and first.manifest.get("hash") != other.manifest.get("hash"):
            differ = "with different clients or seeds"
        else:
            continue
        raise InputError(f"{first.path} and {other.path} ran {differ}: look at each alone")


def _drawn_anew(first: Run, other: Run) -> bool:
    """Whether training images were drawn by seeds that differ, of data that are tested on the same images."""
    one, two = first.config, other.config
    drawn = one.data.train_per_domain is not None or one.data.val_fraction > 0
    return drawn and one.run.seed != two.run.seed and first.manifest.get("test") == other.manifest.get("test")


def _flat(record: RoundRecord) -> dict[str, Any]:
    """Its numbers by name: `accuracy_mean`, `accuracy/photo`, and how many clients were dropped."""
    row = {name: getattr(record, name) for name in PLAIN}
    for name in NESTED:
        row |= {f"{name}/{key}": value for key, value in (getattr(record, name) or {}).items()}
    return {**row, "dropped": len(record.dropped)}
