"""A site's own rules, in a file that no server can change: what a run may ask of the site, and what may leave it.

They bind fedcir's own app, and not another app that a server may send instead: that is code. The privacy budget counts
every noised upload on disk, over all runs.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcir.config import PrivacyConfig, read_toml
from fedcir.data.agreement import DataSummary
from fedcir.data.decoding import IMAGE_SIZE
from fedcir.data.federation import Client
from fedcir.data.opening import selected_classes
from fedcir.errors import InputError, RunError
from fedcir.files import acquire_lock, add_checksum, read_json, write_file
from fedcir.flower.site_data import AuditLog, write_to_state
from fedcir.flower.wire import TaskHeader
from fedcir.server.accounting import Accountant, Adjacency, composed_epsilon
from fedcir.validation import Between, build_dataclass, check_bounds, check_type

LEDGER = "privacy.json"
"""File of the state folder."""
LOCK_TIMEOUT = 30.0

Limit = Annotated[int | None, Between(1, 2**63)]
AboveZero = Annotated[float | None, Between(0, float("inf"), above=True, below=True)]


class PolicyError(InputError):
    """A site's policy does not allow what a run asks for."""


@dataclass(frozen=True)
class PrivacyRules:
    """Clipping and noise of uploads. With this table, nothing leaves the site without them."""

    min_noise: AboveZero = None
    """The least noise, in multiples of the clip (privacy.noise)."""
    max_clip: AboveZero = None
    """The largest norm of a change to the model (privacy.clip)."""
    unit: Literal["client", "example"] = "example"
    """What must be protected: all data of the site, or at least each image."""
    place: Literal["client", "server"] = "client"
    """Who must add the noise: the site itself, or else the server, which must then be trusted."""
    max_epsilon: AboveZero = None
    """The largest epsilon of all uploads of this site, over all runs. The site counts it in its state folder."""
    delta: Annotated[float, Between(0, 1, above=True, below=True)] = 1e-5
    """Probability with which max_epsilon may fail to hold."""

    def __post_init__(self) -> None:
        check_bounds(self, "policy.privacy")
        if self.max_epsilon is not None and self.place == "server":
            raise InputError("policy.privacy.max_epsilon counts noise that the site adds: set place=client")

    def check(self, privacy: PrivacyConfig) -> None:
        """Refuse privacy settings of a run that protect less."""
        if privacy.clip is None or not privacy.noise:
            raise _refuse("asks for privacy.clip and privacy.noise", "its table [privacy] lets nothing else leave")
        for setting, refused, rule in (
            ("place=server", self.place == "client" and privacy.by_server, "the site itself must add the noise"),
            ("unit=example", self.unit == "client" and privacy.unit == "example", "it protects all data of the site"),
            (f"noise={privacy.noise:g}", privacy.noise < (self.min_noise or 0), f"its min_noise is {self.min_noise}"),
            (f"clip={privacy.clip:g}", privacy.clip > (self.max_clip or np.inf), f"its max_clip is {self.max_clip}"),
        ):
            if refused:
                raise _refuse(f"does not allow privacy.{setting}", rule)


@dataclass(frozen=True)
class Policy:
    """Limits of a site on the runs it takes part in. A rule that is not set limits nothing."""

    allow: bool = True
    """With false, the site takes part in no run."""
    veto: str | None = None
    """A file: while it exists, the site takes part in no run."""
    algorithms: tuple[str, ...] | None = None
    """The methods that a run may use, by name."""
    models: tuple[str, ...] | None = None
    """The networks that a run may use, by name."""
    classes: tuple[str, ...] | None = None
    """The classes that a run may use; the site names no other."""
    max_rounds: Limit = None
    """The most rounds of a run."""
    max_steps: Limit = None
    """The most local steps of a round."""
    max_batch_size: Limit = None
    """The most images of a step."""
    min_steps: Annotated[int, Between(1, 2**63)] = 1
    """The fewest local steps of a round: one step uploads the gradient of its images."""
    min_batch_size: Annotated[int, Between(1, 2**63)] = 1
    """The fewest images of a step, and to train on."""
    max_image_size: Limit = None
    """The largest width and height of an image, in pixels."""
    min_per_class: Annotated[int, Between(1, 2**63)] = 1
    """The fewest images of each class, among those to train, to validate and to test on, before anything is shared."""
    column_sums: bool = True
    """Whether sums over training rows of a table may leave: counts, sums and sums of squares of columns of numbers."""
    categories: bool = True
    """Whether the categories of a table's columns may leave."""
    masked: bool = False
    """Whether a run must mask sums (server.masked), so that the server learns only the total over sites."""
    mask_keys: tuple[str, ...] | None = None
    """Public mask keys of the other sites, 64 hexadecimal digits each: a run with another key gets no masked sums."""
    never_send: tuple[str, ...] = ()
    """Tensors that never leave the site, by the beginning of their names, such as "prototypes/" or "model/head."."""
    privacy: PrivacyRules | None = None
    """Differential privacy that the site asks for."""

    def __post_init__(self) -> None:
        check_bounds(self, "policy")

    def check_header(self, header: TaskHeader) -> None:
        """Refuse a run before anything is opened for it."""
        if not self.allow:
            raise _refuse("takes part in no run", "allow is false")
        if self.veto is not None and Path(self.veto).expanduser().exists():
            raise _refuse("takes part in no run", f"{self.veto} exists")
        config = header.config
        names = [("algorithm.name=", Path(config.algorithm.name).name, self.algorithms)]
        names += [("model.name=", config.model.name, self.models)]
        names += [("the class ", name, self.classes) for name in _list_requested_classes(header)]
        for setting, name, allowed in names:
            if allowed is not None and name not in allowed:
                raise _refuse(f"does not allow {setting}{name}", f"it allows {', '.join(allowed) or 'none'}")
        if (epochs := config.local.epochs) is not None and (self.min_steps > 1 or self.max_steps is not None):
            raise _refuse(f"does not allow local.epochs={epochs}", "it limits local.steps")
        size = 0 if config.data.name == "csv" else config.data.image_size or IMAGE_SIZE
        for setting, number, least, most in (
            ("server.rounds", max(config.server.rounds, header.round), 0, self.max_rounds),
            ("local.steps", config.local.steps, self.min_steps, self.max_steps),
            ("local.batch_size", config.local.batch_size, self.min_batch_size, self.max_batch_size),
            ("data.image_size", size, 0, self.max_image_size),
        ):
            if number < least or (most is not None and number > most):
                rule = f"it asks for at least {least}" if number < least else f"it allows at most {most}"
                raise _refuse(f"does not allow {setting}={number}", rule)
        if self.masked and not config.server.masked:
            raise _refuse("asks for server.masked", "masked is true")
        if self.privacy is not None:
            self.privacy.check(config.privacy)

    def check_mask_keys(self, others: Iterable[bytes]) -> None:
        """Refuse to mask sums with keys that are not known to be other sites': the server relays them."""
        if self.mask_keys is None:
            return
        if unknown := [key.hex() for key in others if key.hex() not in self.mask_keys]:
            raise _refuse("does not know a key with which it is to mask its sums", f"{unknown[0]} is not in mask_keys")

    def limit_classes(self, header: TaskHeader) -> TaskHeader:
        """Return the header with the classes that the policy allows, if the run names none."""
        if self.classes is None or _list_requested_classes(header):
            return header
        return replace(header, classes=self.classes)

    def filter_classes(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the classes of this site that a server may know."""
        return tuple(name for name in classes if self.classes is None or name in self.classes)

    def check_data(self, client: Client) -> None:
        """Refuse to share anything if there are too few images. The server learns neither the class nor the number."""
        parts = {"train": client.train, "validate": client.validation, "test": client.test}
        known = {name: data for name, data in parts.items() if data is not None}
        labels = {name: data.labels().numpy() for name, data in known.items()} if self.min_per_class > 1 else {}
        self.check_counts(None if client.train is None else len(client.train), labels)

    def check_counts(self, images: int | None, parts: Mapping[str, NDArray[np.int64]]) -> None:
        """Check the number of training images, if there are any, and the labels of each part."""
        if images is not None and images < self.min_batch_size:
            rule = f"min_batch_size is {self.min_batch_size}, and there are {images} to train on"
            raise _refuse("asks for more images to train on than the run leaves", rule)
        for part, labels in parts.items():
            fewest = min(Counter(labels.tolist()).values(), default=self.min_per_class)
            if fewest < self.min_per_class:
                rule = f"it asks for {self.min_per_class} of each class to {part} on, and one class has {fewest}"
                raise _refuse("asks for more images of each class than the site has", rule)

    def check_summary(self, summary: DataSummary) -> None:
        """Refuse to tell the sums or the categories of a table."""
        if not self.column_sums and any(column.count for column in (*summary.columns, *summary.targets)):
            raise _refuse("does not allow data.scale=federation, which takes sums of columns", "column_sums is false")
        if not self.categories and (column := next((c for c in summary.columns if c.categories), None)):
            rule = f"categories is false, and {column.name!r} has some"
            raise _refuse("does not allow columns of categories: name them in data.ignore", rule)

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse to send any of these tensors, `group/name`, or a whole group, `group/`."""
        for name in names:
            if name.startswith(self.never_send):
                raise _refuse(f"never sends {name}", f"never_send is {', '.join(self.never_send)}")

    def __str__(self) -> str:
        """The rules that limit something, as they are written."""
        rules = {"allow": self.allow, **_list_changed_fields(self)}
        if (privacy := rules.pop("privacy", None)) is not None:
            changed = {"place": privacy.place, **_list_changed_fields(privacy)}
            rules |= {f"privacy.{name}": value for name, value in changed.items()}
        return ", ".join(f"{name} = {json.dumps(value)}" for name, value in rules.items())


def read_policy(path: str) -> Policy:
    """Read a policy file; without a path there are no limits, and a file that cannot be read allows nothing."""
    if not path:
        return Policy()
    try:
        return build_dataclass(Policy, read_toml(Path(path).expanduser()), "policy")
    except InputError as error:
        raise PolicyError(str(error), public="its policy cannot be read") from error


def _list_changed_fields(rules: Policy | PrivacyRules) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    return {f.name: getattr(rules, f.name) for f in fields(rules) if getattr(rules, f.name) != f.default}


def _refuse(public: str, rule: str) -> PolicyError:
    """Make the error of a refusal: the server learns what is refused, and only the site's own log has the rule."""
    return PolicyError(f"this site's policy {public}: {rule}", public=f"its policy {public}")


def _list_requested_classes(header: TaskHeader) -> tuple[str, ...]:
    return (*header.classes, *selected_classes(header.config.data))


@dataclass(frozen=True)
class Spending:
    """Noised sums of one kind that a site has uploaded."""

    noise: float
    rate: float
    adjacency: Adjacency
    steps: int = 0
    """Number of sums."""
    uploads: int = 0
    """Number of uploads that hold them."""


@dataclass(frozen=True)
class PrivacyBudget:
    """Spent privacy budget of a site, in a file of its state folder."""

    folder: Path
    site: str
    """The site's name in its node-config. Several sites may share a state folder."""
    rules: PrivacyRules | None

    def spend(self, accountant: Accountant, steps: int) -> tuple[int, float | None]:
        """Count an upload before it leaves, if the rules allow it; return the number of uploads so far, and epsilon."""
        with write_to_state(self.folder):
            lock = acquire_lock(self.folder / f".{LEDGER}.lock", LOCK_TIMEOUT)
            if lock is None:
                raise RunError(f"another process keeps {self.folder / LEDGER} locked", public="it is busy")
            with lock:
                ledger, uploads, epsilon = self.check(accountant, steps)
                sites = {name: [asdict(entry) for entry in entries] for name, entries in ledger.items()}
                write_file(self.folder / LEDGER, json.dumps(add_checksum({"sites": sites}), indent=1) + "\n")
                (self.folder / LEDGER).chmod(0o600)
        return uploads, epsilon

    def check(self, accountant: Accountant, steps: int) -> tuple[dict[str, list[Spending]], int, float | None]:
        """Return the ledger with another upload, the site's number of uploads, and epsilon if the rules limit it."""
        ledger = self._read()
        spent = ledger.setdefault(self.site, [])
        kind = Spending(accountant.noise, accountant.rate, accountant.adjacency)
        before = next((entry for entry in spent if replace(entry, steps=0, uploads=0) == kind), kind)
        spent[:] = [entry for entry in spent if entry is not before]
        spent.append(replace(kind, steps=before.steps + steps, uploads=before.uploads + 1))
        uploads = sum(entry.uploads for entry in spent)
        if self.rules is None or self.rules.max_epsilon is None:
            return ledger, uploads, None
        self._check_complete(uploads - 1)
        delta, most = self.rules.delta, self.rules.max_epsilon
        try:
            epsilon = composed_epsilon(
                [(Accountant(s.noise, delta, s.rate, s.adjacency), s.steps) for s in spent], delta
            )
        except InputError as error:  # no Opacus
            raise PolicyError(str(error), public="it cannot count its privacy budget") from error
        if epsilon > most:
            raise PolicyError(
                f"this site's privacy budget is used up: another upload would bring epsilon to {epsilon:.4g}, above "
                f"max_epsilon = {most:g} of its policy, at delta = {delta:g}",
                public="its privacy budget is used up",
            )
        return ledger, uploads, epsilon

    def _check_complete(self, uploads: int) -> None:
        """Refuse a ledger with fewer uploads than the audit log numbers: it was deleted or replaced."""
        entries = [entry for entry in AuditLog(self.folder).entries() if str(entry.get("site")) == self.site]
        if (recorded := max((entry.get("upload", 0) for entry in entries), default=0)) > uploads:
            raise PolicyError(
                f"{self.folder / LEDGER} counts {uploads} uploads of {self.site!r}, but the audit log beside it "
                f"names {recorded}: restore the file from a backup",
                public="its count of privacy spent is incomplete",
            )

    def _read(self) -> dict[str, list[Spending]]:
        path = self.folder / LEDGER
        if not path.exists():
            return {}
        try:
            content = read_json(path, dict, "restore it from a backup")
            sites: dict[str, list[Spending]] = check_type(content["sites"], dict[str, list[Spending]], LEDGER)
            return sites
        except (InputError, KeyError) as error:
            raise PolicyError(str(error), public="its count of privacy spent cannot be read") from error
