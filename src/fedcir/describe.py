"""What a method says of itself: its idea, citation, fields and uploads, all read from its class."""

import ast
import dataclasses
import inspect
import sys
from typing import Any

from fedcir.algorithm import Algorithm


def describe(cls: type[Algorithm]) -> dict[str, Any]:
    """Everything there is to know of a method, as JSON can hold it."""
    algorithm = cls()
    idea = (inspect.getdoc(sys.modules[cls.__module__]) or "").splitlines()
    return {
        "name": cls.__name__.lower(),
        "class": cls.__name__,
        "idea": idea[0].partition(": ")[2] if idea else "",
        "citation": (inspect.getdoc(cls) or "").splitlines()[0],
        "uploads": [*algorithm.trains, *algorithm.sends],
        "keeps": list(algorithm.keeps),
        "fields": [
            {"name": f.name, "default": f.default, "doc": field_docs(cls).get(f.name, "")}
            for f in dataclasses.fields(cls)
            if f.init
        ],
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
