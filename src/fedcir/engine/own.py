"""What stays with each client, and what is uploaded."""

from torch import nn

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import (
    Config,
)
from fedcir.engine.uploads import Upload
from fedcir.models.tensors import batchnorm_names, is_statistic
from fedcir.types import InputError


def upload_of(config: Config, algorithm: Algorithm) -> Upload:
    """How clients upload what they train; where all data are in one place, nothing is uploaded."""
    return "float32" if algorithm.pools else config.server.upload


def own_batchnorm(config: Config, algorithm: Algorithm) -> str | None:
    """What leaves each site BatchNorm of its own, if anything; with all data in one place there is one site only."""
    if algorithm.pools or not algorithm.one_model:
        return None
    if algorithm.keeps_batchnorm:
        return config.algorithm.name
    return "model.batchnorm=local" if config.model.batchnorm == "local" else None


def keeps_something(config: Config, algorithm: Algorithm) -> bool:
    """Whether clients keep anything from one round to another."""
    rounds_off = upload_of(config, algorithm) != "float32"
    return bool(algorithm.keeps or algorithm.remembers or own_batchnorm(config, algorithm) or rounds_off)


def own_tensors(config: Config, algorithm: Algorithm, model: nn.Module) -> frozenset[str]:
    """The tensors of the model that stay with each client: whole BatchNorm layers, their statistics, or none."""
    if own_batchnorm(config, algorithm) is None:
        return frozenset()
    if algorithm.keeps_batchnorm:
        return batchnorm_names(model)
    return frozenset(filter(is_statistic, model.state_dict()))


def check_own(config: Config, algorithm: Algorithm, domain: str, trains: bool) -> None:
    """A site's own BatchNorm statistics are those of its training data, and so is a model of its own."""
    what = own_batchnorm(config, algorithm) if algorithm.one_model else config.algorithm.name
    if what and not trains:
        raise InputError(
            f"{what} needs training data at every client, but {domain!r} has none: "
            "it cannot be used with partition.hold_out"
        )
