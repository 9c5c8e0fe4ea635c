"""Resolve a config against the data and the machine, and build one from the arguments of a Python call."""

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedcir.algorithms import limit_rounds, resolve_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.client.masks import FEWEST
from fedcir.client.state import has_local_tensors
from fedcir.config import (
    BUILTIN_MODELS,
    OPTIONS,
    AlgorithmConfig,
    Assignments,
    Config,
    ConfigRequest,
    ModelConfig,
    config_from_tables,
    merge_tables,
)
from fedcir.data.federation import Roster
from fedcir.errors import InputError
from fedcir.machine import count_cores
from fedcir.models.optimizers import find_optimizer
from fedcir.server.accounting import epsilon_after
from fedcir.server.aggregation import find_aggregator
from fedcir.server.coalitions import check_sites
from fedcir.tasks.task import Task
from fedcir.validation import build_dataclass


def resolve_config(config: Config, algorithm: Algorithm, roster: Roster) -> Config:
    """Fill in defaults that depend on the data and the machine, and validate the result."""
    config = limit_rounds(config, algorithm)
    clients = roster.holders
    active = clients if config.server.active is None else config.server.active
    if active > clients:
        raise InputError(f"server.active is {active}, but there are {clients} clients: lower it")
    if config.server.min_replies > active:
        raise InputError(f"server.min_replies is {config.server.min_replies}, above {active} active clients: lower it")
    _check_task(config, algorithm, roster.builder.task)
    _check_validation_use(config, algorithm, roster)
    _check_optimizer(config, algorithm)
    _check_epochs(config, algorithm)
    if algorithm.one_shot:
        _check_one_shot(config)
    if config.model.start != "none":
        _check_start(config, algorithm, roster)
    if config.server.masked:
        algorithm.check_masks()
        if active < FEWEST:
            raise InputError(f"server.masked needs {FEWEST} clients that mask together, but {active} is active")
    check_stored_sums(config, algorithm)
    if config.server.store_sums:
        check_sites(clients, getattr(algorithm, "project", 0) or roster.builder.features)
    if not algorithm.pools:
        _check_aggregation(config, algorithm, active)
    elif config.privacy.clip is not None:
        reason = "has all data in one place, so privacy.clip has no clients to protect"
        raise InputError(f"{config.algorithm.name} {reason}: use another method, or no privacy.clip")
    run = replace(config.run, device=str(pick_device(config.run.device)))
    if run.layout == "auto":
        run = replace(run, layout=choose_layout(config.model, roster.builder.encoder))
    elif run.layout == "channels_last" and (fault := find_unsafe_layer(roster.builder.encoder())):
        raise InputError(f"run.layout=channels_last is not safe with {fault}: leave it out")
    if config.server.upload != "float32" and not algorithm.one_model:
        reason = f"uploads no model, and server.upload={config.server.upload} rounds the changes of one"
        raise InputError(f"{config.algorithm.name} {reason}: leave it out")
    build_dataclass(type(algorithm), get_hyper_parameters(algorithm), "algorithm")  # validates an instance from Python
    config = replace(config, server=replace(config.server, active=active))
    return replace(
        config,
        server=replace(config.server, rounds=_limit_rounds(config, roster, algorithm.one_shot)),
        algorithm=AlgorithmConfig(config.algorithm.name, get_hyper_parameters(algorithm)),
        run=run,
    )


def _check_task(config: Config, algorithm: Algorithm, task: Task) -> None:
    """Refuse methods and settings that compute with classes, for a task that has none."""
    if task.has_classes:
        return
    if algorithm.needs_classes:
        raise InputError(f"{config.algorithm.name} computes with classes, which {task.name} has not: {ANY_TASK}")
    for setting, value, default in (
        ("local.prior", config.local.prior, "none"),
        ("local.balance", config.local.balance, "none"),
        ("model.start", config.model.start, "none"),
    ):
        if value != default:
            raise InputError(f"{setting}={value} computes with classes, which {task.name} has not: leave it out")


ANY_TASK = "use fedavg, fedprox, fedbn, scaffold or another method for any task"


def _check_validation_use(config: Config, algorithm: Algorithm, roster: Roster) -> None:
    """Refuse to choose a round without validation images, with noise, or if sites hold parts of the model."""
    patience = config.server.patience
    for setting, is_set in (
        ("keep=best", config.server.keep == "best"),
        (f"patience={patience}", patience is not None),
    ):
        if is_set and not config.data.val_fraction:
            raise InputError(
                f"server.{setting} picks a round on validation images, but data.val_fraction is 0: "
                f"set data.val_fraction=0.1, or leave out server.{setting}"
            )
        if is_set and config.privacy.noise:
            raise InputError(f"server.{setting} picks a round by scores, which have no noise: leave it out")
    if config.server.keep == "last":
        return
    if has_local_tensors(config, algorithm) and "key" in roster.manifest:
        parts = f"what sites keep of {config.algorithm.name}'s model"
        raise InputError(f"server.keep=best cannot bring back {parts}: set server.keep=last")


def _check_optimizer(config: Config, algorithm: Algorithm) -> None:
    """Refuse an optimiser that does not exist, or that the method cannot do with."""
    name = config.local.optimizer
    if name.lower() == "sgd":
        return
    find_optimizer(name)
    if algorithm.needs_sgd:
        raise InputError(
            f"local.optimizer={name}: {config.algorithm.name} computes with the steps of SGD; set local.optimizer=sgd"
        )


def _check_epochs(config: Config, algorithm: Algorithm) -> None:
    """Refuse numbers of steps that differ between clients where something counts on one, or none are taken."""
    name, epochs = config.algorithm.name, config.local.epochs
    if algorithm.counts_steps and config.privacy.clip is not None:
        raise InputError(f"{name} needs each client's own update, and privacy.clip shows their mean: use fedavg")
    if epochs is None:
        return
    if algorithm.pools:
        reason = f"{name} takes the steps of all clients on data in one place"
    elif algorithm.one_shot:
        reason = f"clients of {name} take no steps"
    elif config.privacy.by_steps:
        reason = "privacy.unit=example accounts for the same number of steps at each client"
    else:
        return
    raise InputError(f"local.epochs={epochs}: {reason}; leave it out")


def _check_one_shot(config: Config) -> None:
    """Refuse settings that change updates of a model, where clients send sums instead."""
    if config.model.partial:
        raise InputError(f"{config.model.frozen_by}: clients of {config.algorithm.name} take no steps; leave it out")
    settings = {
        "server.aggregation": (config.server.aggregation, "mean"),
        "server.upload": (config.server.upload, "float32"),
        "privacy.clip": (None if config.privacy.by_steps else config.privacy.clip, None),
    }
    for name, (value, default) in settings.items():
        if value != default:
            fix = "set privacy.unit=example and privacy.noise" if name == "privacy.clip" else "leave it out"
            raise InputError(f"{name}={value} is for models, but {config.algorithm.name} sends sums: {fix}")


def check_stored_sums(config: Config, algorithm: Algorithm) -> None:
    """Refuse to store sums where there are none, or none of single clients without noise."""
    if not config.server.store_sums:
        return
    if "sums" not in algorithm.sends:
        raise InputError("server.store_sums stores the sums that only fedcirone sends: leave it out")
    for setting, is_set in (("server.masked", config.server.masked), ("privacy.noise", config.privacy.noise > 0)):
        if is_set:
            hidden = f"server.store_sums stores the exact sums of single sites, which {setting} hides"
            raise InputError(f"{hidden}: leave one of them out", public=hidden)


def _check_start(config: Config, algorithm: Algorithm, roster: Roster) -> None:
    """Refuse a fitted head where the method has no linear head on the encoder's features, or sums must be private."""
    start, names = f"model.start={config.model.start}", roster.builder.classifier().state_dict().keys()
    is_shared = algorithm.one_model and not algorithm.keeps_head
    if not is_shared or algorithm.build(roster.builder)["model"].state_dict().keys() != names:
        raise InputError(f"{start} fits a linear head on features, which {config.algorithm.name} has not: leave it out")
    if config.privacy.clip is not None:
        raise InputError(f"{start} has clients send exact sums, which privacy.clip does not protect: leave one out")


def _check_aggregation(config: Config, algorithm: Algorithm, active: int) -> None:
    """Refuse an aggregation rule that does not fit the method, the settings or the number of clients."""
    name, rule = config.server.aggregation, find_aggregator(config.server.aggregation)
    if name != "mean" and not algorithm.one_model:
        reason = f"combines models, but {config.algorithm.name} shares none"
        raise InputError(f"server.aggregation={name} {reason}: set it to mean")
    if config.server.weighting == "samples" and not rule.uses_weights:
        raise InputError(f"server.aggregation={name} does not weight clients: set server.weighting=uniform")
    if config.model.batchnorm == "pooled" and not rule.averages:
        reason = f"needs a mean over all clients, but server.aggregation={name} is none"
        raise InputError(f"model.batchnorm=pooled {reason}: set model.batchnorm=average")
    if active < (needed := rule.min_clients(config.server)):
        fix = "lower server.byzantine, or choose another rule" if config.server.byzantine else "choose another rule"
        raise InputError(f"server.aggregation={name} needs {needed} active clients, but there are {active}: {fix}")


def _limit_rounds(config: Config, roster: Roster, one_shot: bool) -> int:
    """Number of rounds: server.rounds, or as many of them as privacy.epsilon allows."""
    limit, requested = config.privacy.epsilon, config.server.rounds
    epsilons = partial(epsilon_after, config, roster, one_shot=one_shot)
    first = epsilons(1)  # also without a limit, so that a missing accountant is an error at once
    if limit is None:
        return requested
    rounds = bisect_right(range(1, requested + 1), limit, key=lambda count: epsilons(count) or 0.0)
    if rounds == 0:
        raise InputError(
            f"privacy.epsilon={limit:g} does not allow a single round, whose epsilon is {first:.3g}: "
            f"raise it, or privacy.noise={config.privacy.noise:g}"
        )
    return rounds


KEYWORDS = {
    **{name: option.setting for name, option in OPTIONS.items()},
    "momentum": "local.momentum",
    "weight_decay": "local.weight_decay",
    "min_replies": "server.min_replies",
    "latent": "model.latent",
    "layout": "run.layout",
}
"""Setting of each keyword argument of `train` and `AlgorithmStrategy`."""


ARGUMENT_SECTIONS = ("data", "partition", "model", "algorithm")
"""Sections that do not apply where data, encoder and algorithm are arguments."""


PARTIAL_SETTINGS = {"train", "adapter", "adapter_rank", "adapter_alpha", "adapter_targets"}
"""Settings of [model] that say which parts of an encoder train, wherever it comes from."""


def config_from_keywords(
    algorithm: Algorithm | type[Algorithm] | str | Path, set: Assignments = (), **keywords: Any
) -> tuple[Config, Algorithm]:
    """Build the config and the algorithm of a Python call; keywords that are None are left out."""
    name, method = resolve_algorithm(algorithm)
    defaults = {section: values for section, values in method.defaults.items() if section != "model"}
    tables = merge_tables({"data": {"name": "own"}}, defaults)
    for keyword, value in keywords.items():
        if value is not None:
            section, field = KEYWORDS[keyword].split(".")
            tables = merge_tables(tables, {section: {field: value}})
    settings = ConfigRequest.from_options({}, set=set).tables()
    chosen = {key: value for key, value in settings.items() if key != "model" or not value.keys() <= PARTIAL_SETTINGS}
    if wrong := next((section for section in chosen if section in ARGUMENT_SECTIONS), None):
        raise InputError(f"set takes no settings of [{wrong}] here: data, encoder and algorithm are arguments")
    config = config_from_tables(merge_tables(tables, settings))
    return replace(config, algorithm=AlgorithmConfig(name, get_hyper_parameters(method))), method


def get_hyper_parameters(algorithm: Algorithm) -> dict[str, Any]:
    return {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.init}


def pick_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind, colon, number = name.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if not usable.get(kind) or (colon and number not in map(str, range(count))):
        choices = " or ".join(kind for kind, is_usable in usable.items() if is_usable)
        raise InputError(f"run.device {name!r} is not available here: use {choices}")
    return torch.device(name)


def pick_workers(config: Config, evaluators: int) -> int:
    """Number of clients to train at a time: run.workers, or one for each core or GPU that has a client."""
    most = max(config.server.active or 1, evaluators)
    if not config.run.device.startswith("cpu"):
        return config.run.workers or min(most, len(list_devices(config.run.device)))
    if not (hasattr(os, "memfd_create") and hasattr(os, "fork")):  # worker processes need Linux
        return 1
    return config.run.workers or max(1, min(count_cores() // config.run.threads, most))


def list_devices(name: str) -> list[str]:
    """Devices of a name: all GPUs for cuda, one for cuda:1."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] if name == "cuda" else [name]


def choose_layout(
    model: ModelConfig, encoder: Callable[[], nn.Module] | None = None
) -> Literal["contiguous", "channels_last"]:
    """Choose the faster memory layout, as measured by benchmarks/layouts.py: channels_last, where it is safe.

    The choice follows a fixed rule instead of a timing, because results depend on it to the last bit.
    """
    if model.freeze or (model.name not in BUILTIN_MODELS and encoder is not None and find_unsafe_layer(encoder())):
        return "contiguous"
    if model.name == "resnet18" and model.width is not None and model.width < 16:
        return "contiguous"  # see find_unsafe_layer
    return "channels_last"


def find_unsafe_layer(network: nn.Module) -> str | None:
    """Describe the first layer that torch must not run in channels_last; None if there is none.

    With few input channels, the gradient of a strided 1x1 convolution writes out of bounds in torch 2.13 on a CPU
    (oneDNN issue 6035).
    """
    for name, layer in network.named_modules():
        strided = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and max(layer.stride) > 1
        if strided and layer.in_channels < 16:
            return f"{name}, a strided 1x1 convolution of {layer.in_channels} channels"
    return None
