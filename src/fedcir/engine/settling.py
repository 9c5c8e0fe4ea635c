"""A config with everything that was left open settled, and that of a caller who brings data and encoder."""

from bisect import bisect_right
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedcir.algorithms import named_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import (
    OPTIONS,
    AlgorithmConfig,
    Asked,
    Assignments,
    Config,
    build,
    config_from,
    merged,
)
from fedcir.data.federation import Roster
from fedcir.engine.cohort import epsilon_after
from fedcir.engine.machine import layout_for, pick_device, unsafe_in_channels_last
from fedcir.engine.own import own_batchnorm
from fedcir.types import InputError


def settled(config: Config, algorithm: Algorithm, roster: Roster) -> Config:
    """The config with everything that was left open settled, as it is saved."""
    clients = roster.holders
    active = clients if config.server.active is None else config.server.active
    if active > clients:
        raise InputError(f"server.active is {active}, but there are {clients} clients: lower it")
    if config.server.min_replies > active:
        raise InputError(
            f"server.min_replies is {config.server.min_replies}, but only {active} clients are active: lower it"
        )
    _check_keep(config, algorithm, roster)
    if not algorithm.pools:
        _check_aggregation(config, algorithm, active)
    elif config.privacy.clip is not None:
        raise InputError(
            f"{config.algorithm.name} has all data in one place, so privacy.clip has no clients to protect: "
            "use another method, or no privacy.clip"
        )
    run = replace(config.run, device=str(pick_device(config.run.device)))
    if run.layout == "auto":
        run = replace(run, layout=layout_for(config.model, roster.task.encoder))
    elif run.layout == "channels_last" and (fault := unsafe_in_channels_last(roster.task.encoder())):
        raise InputError(f"run.layout=channels_last is not safe with {fault}: leave it out")
    if config.server.upload != "float32" and not algorithm.one_model:
        raise InputError(
            f"{config.algorithm.name} uploads no model, and server.upload={config.server.upload} rounds the changes of "
            "one: leave it out"
        )
    build(type(algorithm), hyper_parameters(algorithm), "algorithm")  # one made in Python has not been checked
    config = replace(config, server=replace(config.server, active=active))
    return replace(
        config,
        server=replace(config.server, rounds=_affordable(config, roster)),
        algorithm=AlgorithmConfig(config.algorithm.name, hyper_parameters(algorithm)),
        run=run,
    )


def _check_keep(config: Config, algorithm: Algorithm, roster: Roster) -> None:
    """Refuse to save the best round's model where nothing says which it is, or where parts of it are elsewhere."""
    if config.server.keep == "last":
        return
    if not config.data.val_fraction:
        raise InputError(
            "server.keep=best picks a round on validation images, but data.val_fraction is 0: "
            "set data.val_fraction=0.1, or server.keep=last"
        )
    if config.privacy.noise:
        raise InputError("server.keep=best picks a round by accuracies, which have no noise: set server.keep=last")
    own = not algorithm.one_model or own_batchnorm(config, algorithm) is not None
    if own and "key" in roster.manifest:
        raise InputError(
            f"server.keep=best cannot bring back what sites keep of {config.algorithm.name}'s model: "
            "set server.keep=last"
        )


def _check_aggregation(config: Config, algorithm: Algorithm, active: int) -> None:
    """Refuse a form that has too few clients to choose from, or no model to be of."""
    form, bad = config.server.aggregation, config.server.byzantine or 0
    if form != "mean" and not algorithm.one_model:
        raise InputError(
            f"server.aggregation={form} is of models, but {config.algorithm.name} shares none: set it to mean"
        )
    if form == "krum" and active < 2 * bad + 3:
        raise InputError(
            f"server.aggregation=krum needs {2 * bad + 3} active clients where server.byzantine={bad} may be bad, "
            f"but there are {active}: lower server.byzantine, or choose another form"
        )
    if form in ("median", "trimmed-mean") and active < 3:
        raise InputError(
            f"server.aggregation={form} needs 3 active clients, but there are {active}: choose another form"
        )


def _affordable(config: Config, roster: Roster) -> int:
    """The rounds that were asked for, or as many of them as privacy.epsilon allows."""
    limit, asked = config.privacy.epsilon, config.server.rounds
    first = epsilon_after(config, roster, 1)  # asked for in any case, so that a missing accountant is known at once
    if limit is None:
        return asked
    rounds = bisect_right(range(1, asked + 1), limit, key=lambda count: epsilon_after(config, roster, count) or 0.0)
    if rounds == 0:
        raise InputError(
            f"privacy.epsilon={limit:g} does not allow a single round, whose epsilon is {first:.3g}: "
            f"raise it, or privacy.noise={config.privacy.noise:g}"
        )
    return rounds


KEYWORDS = {
    **{name: option.place for name, option in OPTIONS.items()},
    "momentum": "local.momentum",
    "weight_decay": "local.weight_decay",
    "min_replies": "server.min_replies",
    "latent": "model.latent",
    "layout": "run.layout",
}
"""The setting that a keyword of `train` and `AlgorithmStrategy` stands for."""


BROUGHT = ("data", "partition", "model", "algorithm")
"""Sections that say nothing to a caller who brings data, encoder and algorithm."""


def own_config(
    algorithm: Algorithm | type[Algorithm] | str | Path, set: Assignments = (), **keywords: Any
) -> tuple[Config, Algorithm]:
    """Settings and algorithm of a caller who brings data and an encoder; None is as good as not given."""
    name, method = named_algorithm(algorithm)
    own = {section: values for section, values in method.defaults.items() if section != "model"}
    tables = merged({"data": {"name": "own"}}, own)
    for keyword, value in keywords.items():
        if value is not None:
            section, field = KEYWORDS[keyword].split(".")
            tables = merged(tables, {section: {field: value}})
    said = Asked.of({}, set=set).tables()
    if wrong := next((section for section in said if section in BROUGHT), None):
        raise InputError(f"set takes no settings of [{wrong}] here: data, encoder and algorithm are arguments")
    config = config_from(merged(tables, said))
    return replace(config, algorithm=AlgorithmConfig(name, hyper_parameters(method))), method


def hyper_parameters(algorithm: Algorithm) -> dict[str, Any]:
    return {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.init}
