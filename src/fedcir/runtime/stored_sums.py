"""The sums of single clients in a run folder, and what clients reply about the heads of all coalitions of them.

With `server.store_sums`, `fedcir worth` and `fedcir forget` need no images. The files hold what no other file of a run
does: the message of each client.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedcir import files
from fedcir.algorithms.fedcirone import FedCiROne, list_site_keys
from fedcir.client.head_bank import COALITIONS
from fedcir.models.site_statistics import StandardisedEncoder
from fedcir.server.coalitions import Message, check_sites, solve_heads, standardise_messages
from fedcir.tensor_files import pack_groups, unpack_groups
from fedcir.types import ClientReply, Groups, Tensors, ignore_progress

FOLDER, NAME = "sums", "client-{:06d}.safetensors"
HITS = "coalitions.safetensors"


class StoredSums:
    """The folder `sums` of a run folder."""

    def __init__(self, run: Path) -> None:
        self.path = run / FOLDER

    def save(self, replies: Iterable[ClientReply], round: int) -> Iterator[ClientReply]:
        """Store the sums of replies as they pass, in place of those of an earlier try."""
        if self.path.exists():
            for old in self.path.iterdir():
                old.unlink()
        else:
            files.make_inner_folder(self.path)
        for reply in replies:
            content = pack_groups({"reply": reply.tensors}, round)
            files.write_file(self.path / NAME.format(reply.client_id), content)
            yield reply

    def list_clients(self) -> list[int]:
        """Numbers of the clients whose sums are stored, in ascending order."""
        return sorted(int(path.stem.partition("-")[2]) for path in self.path.glob("client-*.safetensors"))

    def load(self, client: int) -> Groups:
        return unpack_groups(self.path / NAME.format(client), "reply")[0]["reply"]

    def make_heads(
        self, algorithm: FedCiROne, encoder: StandardisedEncoder, domain_of: Callable[[int], str]
    ) -> Tensors:
        """Solve the heads of all coalitions, for an encoder with the statistics of the run's model."""
        clients = self.list_clients()
        check_sites(len(clients), len(encoder.mean))
        messages = (
            Message(domain_of(client), self.load(client)["sums"], list_site_keys(domain_of(client), client))
            for client in clients
        )
        heads = solve_heads(standardise_messages(algorithm, encoder, messages), ignore_progress)
        return heads.to_tensors()

    def save_hits(self, replies: Mapping[str, Groups], heads: Tensors) -> None:
        """Store the bits that evaluation replies hold, by domain."""
        hits = {domain: groups[COALITIONS] for domain, groups in replies.items() if COALITIONS in groups}
        features = heads["weight"].shape[2]
        about = {"heads": {"widths": torch.tensor([features, heads["basis"].shape[1] or features])}}
        files.write_file(self.path / HITS, pack_groups({"hits": hits, "about": about}, 1))

    @property
    def has_hits(self) -> bool:
        return (self.path / HITS).exists()

    def load_hits(self) -> tuple[dict[str, Tensor], int, int]:
        """Bits (H, N / 8) by domain, the number of features, and that of directions that heads in between use."""
        kinds, _ = unpack_groups(self.path / HITS, "hits", "about")
        bits = {domain: group["bits"] for domain, group in kinds["hits"].items()}
        features, directions = kinds["about"]["heads"]["widths"].tolist()
        return bits, features, directions
