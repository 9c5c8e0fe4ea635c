"""What a method says of itself: idea, citation and fields from its class, and what travels, seen in a round."""

import ast
import dataclasses
import inspect
import sys
from typing import Any

import torch
from torch.utils.data import TensorDataset

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import AlgorithmConfig, Config, LocalConfig, ModelConfig, RunConfig, ServerConfig
from fedcir.data.federation import federation_of
from fedcir.engine.machine import threads
from fedcir.engine.session import open_session
from fedcir.engine.settling import hyper_parameters
from fedcir.engine.transports.serial import SerialTransport
from fedcir.insight.takes import takes
from fedcir.models.resnet import ResNet18
from fedcir.models.tensors import tensor_bytes

CLASSES = 10


def describe(cls: type[Algorithm]) -> dict[str, Any]:
    """Everything there is to know of a method, as JSON can hold it."""
    algorithm = cls()
    idea = (inspect.getdoc(sys.modules[cls.__module__]) or "").splitlines()
    return {
        "name": cls.__name__.lower(),
        "class": cls.__name__,
        "idea": idea[0].partition(": ")[2] if idea else "",
        "citation": (inspect.getdoc(cls) or "").splitlines()[0],
        "keeps": [*algorithm.keeps, *algorithm.remembers, *["batchnorm"] * algorithm.keeps_batchnorm],
        "defaults": {
            f"{section}.{name}": value for section in cls.defaults for name, value in cls.defaults[section].items()
        },
        "fields": [
            {
                "name": f.name,
                "takes": takes(cls, f.name)[0],
                "default": f.default,
                "doc": field_docs(cls).get(f.name, ""),
                "tried": cls.ranges.get(f.name, ""),
            }
            for f in dataclasses.fields(cls)
            if f.init
        ],
    }


def travels(algorithm: Algorithm) -> dict[str, dict[str, int]]:
    """Bytes by group that go down to a client and up from it in a round, once all groups are there.

    Seen in two rounds of resnet18 with ten classes, normalised as the method has it by default; the Centralized method
    moves data instead.
    """
    if algorithm.pools:
        return {"down": {}, "up": {}}
    config = Config(
        local=LocalConfig(steps=1, batch_size=2),
        server=ServerConfig(rounds=2),
        algorithm=AlgorithmConfig(type(algorithm).__name__.lower(), hyper_parameters(algorithm)),
        run=RunConfig(device="cpu", layout="contiguous"),
    )
    site = TensorDataset(torch.zeros(2, 3, 32, 32), torch.arange(2))
    with torch.random.fork_rng(devices=[]):
        norm = algorithm.defaults.get("model", {}).get("norm", ModelConfig.norm)
        federation = federation_of([(site, site)], ResNet18(norm=norm), CLASSES, latent=None, seed=0)
    with threads(config.run.threads):
        session = open_session(config, algorithm, federation)
        transport = SerialTransport(session.workbench(), federation.clients)
        replies = list(transport.train(session.state, session.roster.trainers))
        state = algorithm.server_step(session.state, replies, session.modules, session.context(1))
    up, down = replies[0].arrays, state.shared
    return {
        "down": {group: tensor_bytes({group: bag}) for group, bag in down.items()},
        "up": {group: tensor_bytes({group: bag}) for group, bag in up.items()},
    }


def field_docs(cls: type) -> dict[str, str]:
    """The sentence under each field of a dataclass, its own and the inherited ones."""
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if dataclasses.is_dataclass(each):
            (body,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(each))).body
            assert isinstance(body, ast.ClassDef)
            for field, doc in zip(body.body, body.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(doc, ast.Expr)
                    and isinstance(doc.value, ast.Constant)
                ):
                    docs[ast.unparse(field.target)] = inspect.cleandoc(str(doc.value.value))
    return docs
