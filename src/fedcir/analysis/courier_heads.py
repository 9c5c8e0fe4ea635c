"""One more message by courier: a site tests the heads of all coalitions of a merged run, and signs the bits."""

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from fedcir.algorithms import make_algorithm
from fedcir.client.head_bank import COALITIONS, HeadBank, pack_head_hits
from fedcir.courier.message_file import FIX, pack_signed_file, read_signed_file
from fedcir.data.federation import open_site_federation
from fedcir.errors import InputError, suggest_name
from fedcir.files import check_output_file, check_regular_file, explain_read_errors, write_file
from fedcir.machine import use_threads
from fedcir.runs.reader import Run, restore_model
from fedcir.runtime.stored_sums import HEADS, save_hits
from fedcir.signing import open_key
from fedcir.types import Tensors

SUFFIX = ".hits"


@dataclass(frozen=True)
class ReplyHeader:
    """What a reply says besides the bits."""

    site: str
    run: str
    """Hash of the manifest of the merged run."""


def _load_heads(run: Run) -> HeadBank:
    path = run.path / HEADS
    if not path.exists():
        raise InputError(f"{run.path} has no heads for its sites to test: make it by `fedcir merge --worth`")
    with explain_read_errors(path, "merge the files again"):
        tensors: Tensors = load_file(check_regular_file(path))
        return HeadBank.from_tensors(tensors, tensors["weight"].shape[-1], len(run.card["classes"]))


def make_head_reply(run: Run, folder: Path, out: Path, *, site: str | None = None, key: Path | None = None) -> int:
    """Test the heads of a merged run on the test images of a site, and write one bit for each of both, signed.

    The images, their split and the site's name are those of the site's courier file. Returns the number of images.
    """
    site, key = site or folder.resolve().name, key or out.with_suffix(".key")
    check_output_file(out, [SUFFIX])
    if not os.path.lexists(key):
        raise InputError(f"there is no key {key}: name the one that signed the site's courier file as key")
    signing_key, heads = open_key(key), _load_heads(run)
    clients = {str(client["domain"]): client for client in run.manifest["clients"]}
    if site not in clients:
        raise InputError(f"{site!r} is no site of {run.path}; {suggest_name(site, clients)}")
    config = run.config
    federation = open_site_federation(config, folder, site, tuple(run.card["classes"]))
    client = replace(federation.clients[0], id=clients[site]["id"])
    if client.test is None or len(client.test) != clients[site]["test"]:
        raise InputError(f"{folder} does not have the {clients[site]['test']} test images of {site!r}: restore it")
    federation.load_features()
    with use_threads(config.run.threads), torch.no_grad():
        restored = restore_model(run, config, make_algorithm(config.algorithm), federation.builder)
        ctx = restored.load(client)
        tensors = pack_head_hits(restored.trainer, client.test, heads.to_tensors(), ctx)[COALITIONS]
    write_file(out, pack_signed_file("hits", ReplyHeader(site, run.manifest["hash"]), tensors, signing_key))
    return len(client.test)


def collect_head_replies(run: Run, paths: Collection[Path]) -> None:
    """Verify the replies of all sites of a merged run, and store their bits in its folder."""
    heads = _load_heads(run)
    clients = {str(client["domain"]): client for client in run.manifest["clients"]}
    bits: Tensors = {}
    for path in paths:
        with explain_read_errors(path, FIX):
            header, tensors, signature, _ = read_signed_file(path, "hits", ReplyHeader)
            client = clients.get(header.site)
            if client is None or header.run != run.manifest["hash"]:
                raise InputError("it is about the heads of another run")
            if client.get("node_key") != signature.fingerprint:
                raise InputError(f"it is signed by {signature.fingerprint}, and not by the key of {header.site!r}")
            if header.site in bits:
                raise InputError(f"it is the second reply of {header.site!r}: leave one of them out")
            shape = (len(heads), -(-int(client["test"]) // 8))
            if {*tensors} != {"bits"} or tensors["bits"].dtype != torch.uint8 or tensors["bits"].shape != shape:
                raise InputError("it does not hold a bit for each head and test image")
            bits[header.site] = tensors["bits"]
    if missing := sorted(clients.keys() - bits.keys()):
        raise InputError(f"the reply of {missing[0]!r} is missing: name the files of all {len(clients)} sites")
    save_hits(run.path, [client["id"] for client in clients.values()], bits, heads)
