"""The settings that have a name of their own, on the command line and in Python."""

from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, get_args, get_origin, get_type_hints

from fedcir.config.settings import PATHS, SECTIONS


@dataclass(frozen=True)
class Option:
    place: str
    """The setting that it is, such as local.lr."""
    help: str

    @property
    def type(self) -> type:
        """What it takes: a path, or what its field takes; one of a few names is a text."""
        if self.place in PATHS:
            return Path
        section, name = self.place.split(".")
        hint = get_type_hints(SECTIONS[section])[name]
        if isinstance(hint, UnionType):
            (hint,) = (each for each in get_args(hint) if each is not NoneType)
        return str if get_origin(hint) is Literal else hint


OPTIONS = {
    "algorithm": Option("algorithm.name", "Algorithm, or a file (./mine.py). [default: fedcirplus]"),
    "seed": Option("run.seed", "Seed of all random choices. [default: 0]"),
    "dataset": Option("data.name", "Name of the dataset; see `fedcir data list`."),
    "data_root": Option("data.root", "Folder that holds the dataset."),
    "image_size": Option("data.image_size", "Image width and height; 128 by default for files."),
    "model": Option("model.name", "Network: cnn, resnet18, efficientnet-lite0, or a callable such as ./mine.py:make."),
    "norm": Option("model.norm", "Normalisation: batch, group, invariant or standardised."),
    "rounds": Option("server.rounds", "Number of training rounds."),
    "local_steps": Option("local.steps", "SGD steps per client and round."),
    "lr": Option("local.lr", "Learning rate of the clients."),
    "batch_size": Option("local.batch_size", "Training images per SGD step."),
    "prior": Option("local.prior", "Correction for label skew: none or client."),
    "clients": Option("partition.clients", "Number of clients to divide the domains among."),
    "active": Option("server.active", "Clients that train in each round; all by default."),
    "beta": Option("partition.beta", "Label skew: smaller values skew clients more."),
    "hold_out": Option("partition.hold_out", "Domain to test on but not to train on."),
    "workers": Option("run.workers", "Processes that train; one per core by default."),
    "device": Option("run.device", "Where to train: auto, cpu, cuda or mps."),
    "eval_every": Option("server.eval_every", "Test every N rounds."),
    "keep": Option("server.keep", "Model to save: of the last round, or of the best on validation images."),
}
"""By name, in the order of the command line's help."""
