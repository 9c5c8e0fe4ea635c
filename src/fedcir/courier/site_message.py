"""Compute a site's FedCiROne message from its own folder, as a client of a run would, and sign it."""

import json
import os
from pathlib import Path

from fedcir.algorithms import make_algorithm, resolve_config
from fedcir.client.client_requests import handle_request
from fedcir.client.state import ClientStore
from fedcir.config import Assignments, Config, ConfigRequest
from fedcir.courier.message_file import CourierFile, CourierHeader, pack_signed_file, read_courier_file
from fedcir.data.decoding import OnFile
from fedcir.data.federation import open_site_federation
from fedcir.data.opening import list_site_images, selected_classes
from fedcir.errors import InputError
from fedcir.files import check_output_file, write_file
from fedcir.machine import use_threads
from fedcir.models.builder import NetworkBuilder
from fedcir.models.tensors import hash_tensors, snapshot
from fedcir.runtime.session import Session, open_session
from fedcir.server.accounting import upload_epsilon
from fedcir.signing import open_key
from fedcir.text import join_names

ALGORITHM = "fedcirone"
SITE_SECTIONS = ("data", "model", "privacy", "run")
SITE_FIELD = "project"
"""Field of the algorithm that changes a site's message."""
SUFFIX = ".fedcir"


def make_courier_file(
    folder: Path,
    out: Path,
    *,
    federation: str,
    encoder: str,
    site: str | None = None,
    classes: tuple[str, ...] = (),
    key: Path | None = None,
    image_size: int | None = None,
    seed: int | None = None,
    set: Assignments = (),
    on_file: OnFile | None = None,
) -> tuple[CourierFile, list[str]]:
    """Write the message of a site with images in `folder`/<class>/<image>; return it with notes for the user.

    The site is called as its folder unless it has a name, and the classes are those of its folders unless they are
    given. The key is made if there is none; by default it lies beside the file.
    """
    site, key = site or folder.resolve().name, key or out.with_suffix(".key")
    config = _resolve_site_config(encoder, classes, image_size, seed, set)
    check_output_file(out, [SUFFIX])
    if os.path.lexists(key):
        open_key(key)
    else:
        check_output_file(key)
    chosen = tuple(sorted({*selected_classes(config.data)}))
    opened = open_site_federation(config, folder, site, chosen, on_file)
    client = opened.clients[0]
    session = open_session(config, make_algorithm(config.algorithm), opened)
    images, privacy = client.sizes._asdict(), config.privacy
    values = {name: opened.card[name] for name in ("image_size", "channels")}
    values |= {name: tuple(opened.card[name]) for name in ("classes", "mean", "std")}
    header = CourierHeader(
        federation=federation,
        site=site,
        model=describe_encoder(session),
        encoder=hash_encoder(config, opened.builder),
        seed=config.run.seed,
        val_fraction=config.data.val_fraction,
        project=session.config.algorithm.fields[SITE_FIELD],
        noise=privacy.noise,
        clip=privacy.clip or 0.0,
        delta=privacy.delta if privacy.noise else 0.0,
        **images,
        **values,
    )
    opened.load_features()
    trainer = session.make_trainer()
    trainer.deployed = True  # its noise must not come from the seed
    with use_threads(config.run.threads):
        reply = handle_request(trainer, client, ClientStore(), "train", session.state.shared, 1)
    write_file(out, pack_signed_file("courier", header, reply.tensors["sums"], open_key(key)))
    labels = sorted({item.label for item in list_site_images(folder, site, config.data).pictures.items})
    notes = list(opened.notes)
    if privacy.noise:
        epsilon = upload_epsilon(privacy, config.local, client.sizes.train, 1, one_shot=True)
        spent = f"epsilon of one image is {epsilon:.3g} at delta {privacy.delta:g} towards all who get this file"
        notes.append(f"{spent}; each further file of the same images has other noise, and adds to it")
    if unused := [label for label in labels if label not in header.classes]:
        notes.append(f"images of {join_names([*map(repr, unused)])} are left out: --classes does not name them")
    if missing := [label for label in header.classes if label not in labels]:
        notes.append(f"there is no image of {join_names([*map(repr, missing)])}")
    return read_courier_file(out), notes


def _resolve_site_config(
    encoder: str, classes: tuple[str, ...], image_size: int | None, seed: int | None, set: Assignments
) -> Config:
    for section, values in ConfigRequest(assignments=set).tables().items():
        if section not in SITE_SECTIONS and not (section == "algorithm" and [*values] == [SITE_FIELD]):
            fix = "give it to `fedcir merge`" if section in ("algorithm", "algorithms") else "leave it out"
            raise InputError(f"[{section}] does not change a site's message: {fix}")
    data = {"name": "folders", **({"classes": list(classes)} if classes else {})}
    tables = {"data": data, "model": {"freeze": True}, "algorithm": {"name": ALGORITHM}}
    options = {"model": encoder, "image_size": image_size, "seed": seed}
    config = resolve_config(ConfigRequest(options=options, assignments=set, saved=tables))
    if not config.model.freeze or config.data.name != "folders":
        raise InputError("a site's message is of a frozen encoder and of its own folder: leave out what changes that")
    return config


def describe_encoder(session: Session) -> dict[str, object]:
    """Return the settings of the encoder as a model card holds them, in the types of JSON."""
    settings: dict[str, object] = json.loads(json.dumps(session.card["model"]))
    return settings


def hash_encoder(config: Config, builder: NetworkBuilder) -> str:
    """Hash the weights of a frozen encoder, and the file that makes it if it is a user's."""
    code = b"" if config.model.file is None else config.model.file.read_bytes()
    return hash_tensors(snapshot(builder.whole().encoder()), code)
