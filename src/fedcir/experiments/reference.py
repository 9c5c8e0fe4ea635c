"""Reference of methods and settings: their documentation from the source, and the traffic of a method's round."""

import ast
import dataclasses
import inspect
import sys
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch.utils.data import TensorDataset

from fedcir.algorithms import find_algorithm, list_algorithms
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import OPTIONS, SECTIONS, AlgorithmConfig, Config, LocalConfig, ModelConfig, RunConfig, ServerConfig
from fedcir.data.torch_datasets import federation_from_datasets
from fedcir.errors import InputError, suggest_name
from fedcir.machine import use_threads
from fedcir.models.networks import ResNet18
from fedcir.models.tensors import count_bytes
from fedcir.runtime.resolution import get_hyper_parameters
from fedcir.runtime.rounds import SerialTransport
from fedcir.runtime.session import open_session
from fedcir.validation import UNIONS, bounds_of

CLASSES = 10


def describe_algorithm(cls: type[Algorithm]) -> dict[str, Any]:
    """Describe a method by its class, with values that JSON can hold."""
    algorithm = cls()
    idea = (inspect.getdoc(sys.modules[cls.__module__]) or "").splitlines()
    return {
        "name": cls.__name__.lower(),
        "class": cls.__name__,
        "idea": idea[0].partition(": ")[2] if idea else "",
        "citation": (inspect.getdoc(cls) or "").splitlines()[0],
        "keeps": [
            *algorithm.keeps,
            *algorithm.remembers,
            *["batchnorm"] * algorithm.keeps_batchnorm,
            *["head"] * algorithm.keeps_head,
        ],
        "defaults": {
            f"{section}.{name}": value for section in cls.defaults for name, value in cls.defaults[section].items()
        },
        "fields": [
            {
                "name": f.name,
                "takes": describe_field(cls, f.name)[0],
                "default": f.default,
                "doc": field_docs(cls).get(f.name, ""),
                "tried": cls.ranges.get(f.name, ""),
            }
            for f in dataclasses.fields(cls)
            if f.init
        ],
    }


def measure_traffic(algorithm: Algorithm) -> dict[str, dict[str, int]]:
    """Measure the bytes by group that go down to a client and up from it in a round, once all groups are there.

    Measured in two rounds of resnet18 with ten classes and the method's default normalisation. Centralized moves data
    instead.
    """
    if algorithm.pools:
        return {"down": {}, "up": {}}
    config = Config(
        local=LocalConfig(steps=1, batch_size=2),
        server=ServerConfig(rounds=2),
        algorithm=AlgorithmConfig(type(algorithm).__name__.lower(), get_hyper_parameters(algorithm)),
        run=RunConfig(device="cpu", layout="contiguous"),
    )
    site = TensorDataset(torch.zeros(2, 3, 32, 32), torch.arange(2))
    with torch.random.fork_rng(devices=[]):
        norm = algorithm.defaults.get("model", {}).get("norm", ModelConfig.norm)
        federation = federation_from_datasets([(site, site)], ResNet18(norm=norm), CLASSES, latent=None, seed=0)
    with use_threads(config.run.threads):
        session = open_session(config, algorithm, federation)
        transport = SerialTransport(session.make_trainer(), federation.clients)
        replies = list(transport.train(session.state, session.roster.trainers))
        state = algorithm.server_step(session.state, replies, session.modules, session.context(1))
    groups = {"down": state.shared, "up": replies[0].tensors}
    return {way: {group: count_bytes({group: bag}) for group, bag in bags.items()} for way, bags in groups.items()}


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, its own and the inherited ones."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            (body,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base))).body
            assert isinstance(body, ast.ClassDef)
            for field, doc in zip(body.body, body.body[1:], strict=False):
                match field, doc:
                    case ast.AnnAssign(), ast.Expr(ast.Constant(text)):
                        docs[ast.unparse(field.target)] = inspect.cleandoc(str(text))
    return docs


_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def describe_field(cls: type, name: str) -> tuple[str, tuple[str, ...]]:
    """Describe the values of a field of a dataclass, and list its choices if they are few."""
    words, choices = _describe_type(get_type_hints(cls)[name])
    bounds = bounds_of(cls).get(name)
    return words if bounds is None else f"{words}, {bounds}", choices


def _describe_type(hint: Any) -> tuple[str, tuple[str, ...]]:
    if get_origin(hint) in UNIONS:
        types = [arg for arg in get_args(hint) if arg is not NoneType]
        return _describe_type(types[0]) if len(types) == 1 else (str(hint), ())
    if get_origin(hint) is Literal:
        *others, last = get_args(hint)
        return f"{', '.join(map(str, others))} or {last}", get_args(hint)
    if get_origin(hint) is tuple:
        words, choices = _describe_type(get_args(hint)[0])
        return f"list of {', '.join(choices) or words + 's'}", choices
    if get_origin(hint) is dict:
        return "table", ()
    return _WORDS.get(hint, str(hint)), ()


@dataclass(frozen=True)
class Setting:
    name: str
    """Its name as --set takes it, such as local.lr."""
    takes: str
    choices: tuple[str, ...]
    """All possible values, if they are few."""
    default: Any
    meaning: str
    option: str | None
    """The option that sets it, if there is one."""
    made_for: dict[str, Any]
    """Other defaults that algorithms declare, by their names."""

    @property
    def default_text(self) -> str:
        if isinstance(self.default, tuple):
            return ", ".join(self.default)
        if self.default is None or isinstance(self.default, dict):
            return ""
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    @property
    def made_for_text(self) -> str:
        return "".join(f"; {value} for {algorithm}" for algorithm, value in self.made_for.items())


def list_settings(name: str | None = None) -> list[Setting]:
    """List all settings, those of a section, or the setting of this name."""
    if name is None:
        return [setting for section in SECTIONS for setting in _list_section(section)]
    section, _, field = name.strip("[]").partition(".")
    if section not in SECTIONS:
        raise InputError(f"no section [{section}]; {suggest_name(section, SECTIONS)}")
    settings = {setting.name.partition(".")[2]: setting for setting in _list_section(section)}
    if not field:
        return list(settings.values())
    if section == "algorithm" and field != "name":
        methods = [m for m in list_algorithms() if field in {f.name for f in dataclasses.fields(find_algorithm(m))}]
        if not methods:
            raise InputError(f"no method has a field {field!r}: `fedcir algorithms NAME` lists a method's fields")
        explains = f"`fedcir algorithms {methods[0]}` explains it"
        raise InputError(f"algorithm.{field} is a field of {', '.join(methods)}: {explains}")
    if field not in settings:
        raise InputError(f"[{section}] has no field {field!r}; {suggest_name(field, settings)}")
    return [settings[field]]


def _list_section(section: str) -> list[Setting]:
    cls = SECTIONS[section]
    docs = field_docs(cls)
    options = {option.setting: f"--{name.replace('_', '-')}" for name, option in OPTIONS.items()}
    defaults = {name: find_algorithm(name).defaults.get(section, {}) for name in list_algorithms()}
    return [
        Setting(
            name,
            *describe_field(cls, f.name),
            f.default if f.default_factory is dataclasses.MISSING else f.default_factory(),
            docs[f.name],
            options.get(name),
            {algorithm: values[f.name] for algorithm, values in defaults.items() if f.name in values},
        )
        for f in dataclasses.fields(cls)
        if (name := f"{section}.{f.name}") != "algorithm.fields"  # which depend on the method
    ]
