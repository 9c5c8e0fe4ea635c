"""Every setting in words: what it takes, its default, what it means, and the option that sets it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from fedcir.algorithms import algorithm_class, names
from fedcir.config import OPTIONS, SECTIONS, nearest
from fedcir.insight.describe import field_docs
from fedcir.insight.takes import takes
from fedcir.types import InputError


@dataclass(frozen=True)
class Setting:
    name: str
    """As --set takes it, such as local.lr."""
    takes: str
    choices: tuple[str, ...]
    """All values there are, where they are few."""
    default: Any
    meaning: str
    option: str | None
    """The option that sets it, where it has one."""
    made_for: dict[str, Any]
    """The defaults of algorithms that are made for another one, by their names."""

    @property
    def default_text(self) -> str:
        if isinstance(self.default, tuple):
            return ", ".join(self.default)
        if isinstance(self.default, dict):
            return ""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return "" if self.default is None else str(self.default)

    @property
    def made_for_text(self) -> str:
        return "".join(f"; {value} for {algorithm}" for algorithm, value in self.made_for.items())


def settings(which: str | None = None) -> list[Setting]:
    """All settings, those of a section, or the one of this name."""
    every = [each for section in SECTIONS for each in _section(section)]
    if which is None:
        return every
    section, _, field = which.strip("[]").partition(".")
    if section not in SECTIONS:
        raise InputError(f"no section [{section}]; {nearest(section, SECTIONS)}")
    chosen = [each for each in every if each.name.startswith(f"{section}.")]
    if not field:
        return chosen
    if section == "algorithm" and field != "name":
        raise InputError(_of_methods(field))
    fields = {each.name.partition(".")[2]: each for each in chosen}
    if field not in fields:
        raise InputError(f"[{section}] has no field {field!r}; {nearest(field, fields)}")
    return [fields[field]]


def _section(section: str) -> list[Setting]:
    cls = SECTIONS[section]
    docs = field_docs(cls)
    options = {option.place: f"--{name.replace('_', '-')}" for name, option in OPTIONS.items()}
    own = {name: algorithm_class(name).defaults.get(section, {}) for name in names()}
    return [
        Setting(
            name,
            *takes(cls, f.name),
            f.default if f.default_factory is dataclasses.MISSING else f.default_factory(),
            docs[f.name],
            options.get(name),
            {algorithm: said[f.name] for algorithm, said in own.items() if f.name in said},
        )
        for f in dataclasses.fields(cls)
        if (name := f"{section}.{f.name}") != "algorithm.fields"  # they are the method's
    ]


def _of_methods(field: str) -> str:
    """What to say to one who asks for a field that methods have."""
    having = [name for name in names() if field in {f.name for f in dataclasses.fields(algorithm_class(name))}]
    if not having:
        return f"no method has a field {field!r}: `fedcir algorithms NAME` lists a method's fields"
    return f"algorithm.{field} is a field of {', '.join(having)}: `fedcir algorithms {having[0]}` explains it"
