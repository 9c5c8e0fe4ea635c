"""The sums of single clients in a run folder, and what clients reply about the heads of all coalitions of them.

With `server.store_sums`, `fedcir worth` and `fedcir forget` need no images. The files of the folder `sums` hold what no
other file of a run does: the message of each client.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from fedcir import files
from fedcir.client.head_bank import HeadBank
from fedcir.tensor_files import copy_shared_tensors, pack_groups, unpack_groups
from fedcir.types import ClientReply, Groups

FOLDER, NAME = "sums", "client-{:06d}.safetensors"
HITS = "coalitions.safetensors"
"""In the run folder: a bit for each head of a coalition and test image."""
HEADS = "heads.safetensors"
"""In the folder of a run that was merged from courier files: the heads of all coalitions of its sites."""


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


def save_heads(run: Path, heads: HeadBank) -> None:
    files.write_file(run / HEADS, save(copy_shared_tensors(heads.to_tensors())))


def save_hits(run: Path, clients: Sequence[int], bits: Mapping[str, Tensor], heads: HeadBank) -> None:
    """Store the bits (H, N / 8) that clients replied, by domain, of the heads of coalitions of these clients."""
    about = {"clients": torch.tensor(clients), "widths": torch.tensor([heads.weight.shape[2], heads.directions])}
    hits = {domain: {"bits": tensor} for domain, tensor in bits.items()}
    files.write_file(run / HITS, pack_groups({"hits": hits, "about": {"heads": about}}, 1))


def load_hits(run: Path) -> tuple[list[int], dict[str, Tensor], int, int]:
    """Clients, bits by domain, number of features, and number of directions that heads in between use."""
    kinds, _ = unpack_groups(run / HITS, "hits", "about")
    bits = {domain: group["bits"] for domain, group in kinds["hits"].items()}
    about = kinds["about"]["heads"]
    features, directions = about["widths"].tolist()
    return about["clients"].tolist(), bits, features, directions
