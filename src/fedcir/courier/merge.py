"""Merge courier files: check that they belong together, and make the model in a run folder, as a run would."""

import hashlib
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcir.algorithms import make_algorithm, resolve_config
from fedcir.client.cost import peak_memory
from fedcir.config import BUILTIN_MODELS, HUGGING_FACE, PRETRAINED_SIZES, Assignments, Config, ConfigRequest
from fedcir.courier.message_file import CourierFile, CourierHeader, read_courier_file
from fedcir.courier.site_message import ALGORITHM, SITE_FIELD, describe_encoder, hash_encoder
from fedcir.data.federation import SiteRoster, build_roster
from fedcir.errors import InputError
from fedcir.files import explain_read_errors, read_text
from fedcir.machine import check_memory, use_threads
from fedcir.models.tensors import find_mismatch
from fedcir.runtime.resume import attach_run_folder
from fedcir.runtime.rounds import run_rounds
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.session import Session, open_session
from fedcir.runtime.stored_sums import save_heads
from fedcir.text import join_names, to_one_line
from fedcir.types import ClientReply, ServerState

SAME = {
    "classes": "give the same --classes to all sites",
    "federation": "give all sites the same --federation",
    "image_size": "give all sites the same --image-size",
    "channels": "give all sites the same data.channels",
    "mean": "give all sites the same model.mean",
    "std": "give all sites the same model.std",
    "model": "give all sites the same --encoder and settings of [model]",
    "encoder": "give all sites the same version of the encoder",
    "seed": "give all sites the same --seed",
    "val_fraction": "give all sites the same data.val_fraction",
    "project": "give all sites the same algorithm.project",
    "noise": "give all sites the same privacy.noise",
    "clip": "give all sites the same privacy.clip",
    "delta": "give all sites the same privacy.delta",
}
"""Fields of a header that must be equal, with the fix."""
MERGE_MODEL = ("weights", "arguments")
"""Settings of [model] that a merge takes: a file that lies elsewhere, and what is passed to the user's own code."""
KnownKeys = Mapping[str, str | None]
"""Site by fingerprint; None where the key may be any site's."""


class CourierRoster(SiteRoster):
    """Sites that sent files. None of them is asked to evaluate."""

    @property
    def evaluators(self) -> dict[int, str]:
        return {}


@dataclass(frozen=True)
class CourierTransport:
    """Replies from files, in place of clients that are reached."""

    replies: Sequence[ClientReply]

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return iter(self.replies)

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
        return iter(())

    def peak_memory(self) -> int:
        return peak_memory()


def merge_courier_files(
    paths: Collection[Path],
    out: Path,
    *,
    encoder: str | None = None,
    set: Assignments = (),
    known_keys: KnownKeys | None = None,
    worth: bool = False,
) -> list[CourierFile]:
    """Make the model of courier files in the new run folder `out`, and return the files by site.

    With `worth`, the folder also gets the heads of all coalitions of sites, for the sites to test.

    `encoder` is needed where it is the user's own code, which no file may name. With `known_keys`, files that
    another key signed are refused. The order of the paths does not matter.
    """
    files = sorted((read_courier_file(path) for path in paths), key=lambda file: file.header.site)
    if not files:
        raise InputError("name at least one courier file, which `fedcir site` writes")
    if known_keys is not None:
        _check_keys(files, known_keys)
    _check_distinct(files)
    _check_same(files)
    if worth and files[0].header.noise:
        raise InputError("the sums of these files have noise: worth compares exact ones, so leave it out")
    config = _resolve_merge_config(files[0].header, encoder, set)
    is_new = not out.exists()
    with RunFolder(out).lock(), use_threads(config.run.threads):
        session = _open_merge(config, files)
        replies = _make_replies(session, files)
        try:
            attach_run_folder(session, out, resume=False)
            for _ in run_rounds(session, CourierTransport(replies)):
                pass
            if worth:
                sums = {number: lambda file=file: file.sums for number, file in enumerate(files)}
                save_heads(out, session.solve_coalitions(session.state, sums))
        except BaseException:
            if is_new:
                shutil.rmtree(out, ignore_errors=True)
            raise
    return files


def read_known_keys(path: Path) -> dict[str, str | None]:
    """Read known keys from a text file: a fingerprint on each line, and the site that it belongs to if it is known."""
    with explain_read_errors(path, "write a fingerprint and the name of its site on each line"):
        lines = [line.split(maxsplit=1) for line in read_text(path, 10_000_000).splitlines()]
        return {words[0]: words[1].strip() if words[1:] else None for words in lines if words and words[0][0] != "#"}


def _check_keys(files: Sequence[CourierFile], known_keys: KnownKeys) -> None:
    for file in files:
        fingerprint = file.signature.fingerprint
        if fingerprint not in known_keys:
            raise InputError(
                f"{file.path} is signed by {fingerprint}, which is no known key: ask the site for its fingerprint"
            )
        if (site := known_keys[fingerprint]) not in (None, file.header.site):
            raise InputError(f"{file.path} is signed by the key of {site!r}, but says that it is {file.header.site!r}")


def _check_distinct(files: Sequence[CourierFile]) -> None:
    """Refuse files that would count a site twice."""
    for what, values in (
        ("are of the same site", [file.header.site for file in files]),
        ("are signed by the same key", [file.signature.public_key for file in files]),
        ("hold the same sums", [file.content for file in files]),
    ):
        first: dict[str, CourierFile] = {}
        for file, value in zip(files, values, strict=True):
            if value in first:
                raise InputError(f"{first[value].path} and {file.path} {what}: leave one of them out")
            first[value] = file


def _check_same(files: Sequence[CourierFile]) -> None:
    """Refuse files of sites that did not agree."""
    first = files[0]
    for file in files[1:]:
        if differing := sorted({*first.header.classes} ^ {*file.header.classes}):
            has = first if differing[0] in first.header.classes else file
            lacks = file if has is first else first
            raise InputError(f"{has.path} has the class {differing[0]!r} and {lacks.path} has not: {SAME['classes']}")
        for name, fix in SAME.items():
            values = [getattr(header, name) for header in (first.header, file.header)]
            if values[0] != values[1]:
                raise InputError(f"{first.path} and {file.path} differ in {_show_difference(name, *values)}: {fix}")
    for number, label in enumerate(first.header.classes):
        if not first.header.noise and not any(file.images_by_class("train")[number] for file in files):
            raise InputError(f"no site has a training image of {label!r}: leave it out of --classes at all sites")


def _show_difference(name: str, old: Any, new: Any) -> str:
    if not isinstance(old, dict):
        return f"{name} ({to_one_line(old, 100)} and {to_one_line(new, 100)})"
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return join_names([_show_difference(f"{name}.{key}", old.get(key), new.get(key)) for key in differing])


def _resolve_merge_config(header: CourierHeader, encoder: str | None, set: Assignments) -> Config:
    """Resolve the settings of the run: those of the sites for data and encoder, and the user's for the head."""
    for section, values in ConfigRequest(assignments=set).tables().items():
        if (section != "algorithm" or SITE_FIELD in values) and not (
            section == "model" and {*values} <= {*MERGE_MODEL}
        ):
            raise InputError(f"[{section}] was decided at the sites: a merge takes settings of the head only")
    name = str(header.model["name"])
    if encoder is None and name == HUGGING_FACE:
        raise InputError("the encoder is a folder of each site: name your copy, as in --encoder hf:DIR")
    if encoder is None and not {*name.split("+")} <= {*BUILTIN_MODELS, *PRETRAINED_SIZES}:
        raise InputError(f"the encoder {name!r} is code of the sites' own: name your copy as --encoder, and trust it")
    model = {key: value for key, value in header.model.items() if key != "arguments"}
    data = {"name": "folders", "image_size": header.image_size, "channels": header.channels}
    data |= {"classes": list(header.classes), "val_fraction": header.val_fraction}
    head = {"name": ALGORITHM, SITE_FIELD: header.project}
    tables = {"data": data, "model": model, "algorithm": head, "run": {"seed": header.seed}}
    if header.noise:
        privacy = {"noise": header.noise, "clip": header.clip, "delta": header.delta, "unit": "example"}
        tables["privacy"] = privacy
    config = resolve_config(ConfigRequest(options={"model": encoder}, assignments=set, saved=tables))
    if config.algorithm.name != ALGORITHM:
        raise InputError(f"courier files hold the sums of {ALGORITHM}: leave algorithm.name out")
    return config


def _open_merge(config: Config, files: Sequence[CourierFile]) -> Session:
    """Open the run, and check that it has the encoder of the sites."""
    header = files[0].header
    clients = [
        {
            "id": number,
            "domain": file.header.site,
            "train": file.header.train,
            "test": file.header.test,
            "validation": file.header.validation,
            "content": file.content,
            "node_key": file.signature.fingerprint,
        }
        for number, file in enumerate(files)
    ]
    about = {"classes": list(header.classes), "image_size": header.image_size, "channels": header.channels}
    manifest = {"dataset": config.data.name, **about, "clients": clients}
    digest = hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()
    check_memory(5 * 4 * 64 * header.channels * header.image_size**2, f"image_size={header.image_size}")
    sites = build_roster({**manifest, "hash": digest, "key": digest}, config)
    roster = CourierRoster(sites.manifest, sites.builder, sites.card)
    session = open_session(config, make_algorithm(config.algorithm), roster)
    session.deployed = True
    for name, value in {
        **{name: list(getattr(header, name)) for name in ("mean", "std")},
        "model": header.model,
    }.items():
        built = describe_encoder(session) if name == "model" else roster.card[name]
        if built != value:
            raise InputError(
                f"this fedcir and the sites differ in {_show_difference(name, built, value)}: use the same"
            )
    if (own := hash_encoder(config, roster.builder)) != header.encoder:
        raise InputError(
            f"{header.model['name']} has other weights here ({own[:16]}) than at the sites ({header.encoder[:16]}): "
            "use the same version or file of it"
        )
    return session


def _make_replies(session: Session, files: Sequence[CourierFile]) -> list[ClientReply]:
    """Convert the files to replies of clients, and check that they fit this run's encoder and method."""
    replies, template = [], session.template()
    for number, file in enumerate(files):
        reply = ClientReply(number, file.header.train, {"sums": file.sums}, {})
        fault = find_mismatch(reply.tensors, template) or session.algorithm.find_reply_fault(reply, session.context(1))
        if fault is not None:
            raise InputError(f"{file.path} cannot be used: {fault}")
        replies.append(reply)
    return replies
