"""A module imports only from its own package and from the packages above it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedcir

SOURCE = Path(fedcir.__file__).parent

# fmt: off
LAYERS = [
    "types", "rng", "errors", "text", "validation", "files", "signing", "machine", "plugins", "config", "losses",
    "tasks", "models", "algorithms", "tensor_files", "data", "client", "server", "runtime", "courier", "runs",
    "inference", "analysis", "reporting", "experiments", "conformance", "flower", "cli",
]
# fmt: on

FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))
FREE = {Path("__init__.py"), Path("__main__.py")}


def layer_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def layers_imported(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """The layers that any import names, at the top, in a function or for type checking; `fedcir` itself is none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"line {node.lineno}: write imports in full, from fedcir")
        else:
            continue
        for path in paths:
            package, _, rest = path.partition(".")
            if package == "fedcir" and rest.split(".")[0] in modules:
                yield rest.split(".")[0]


def test_every_module_has_a_layer_and_every_layer_a_module() -> None:
    assert {layer_of(file) for file in FILES if file not in FREE} == set(LAYERS)


@pytest.mark.parametrize("file", [file for file in FILES if file not in FREE], ids=str)
def test_a_module_imports_only_from_layers_above(file: Path) -> None:
    own = LAYERS.index(layer_of(file))
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    below = {layer for layer in layers_imported(tree, set(LAYERS)) if LAYERS.index(layer) > own}
    assert not below, f"{file} imports from {', '.join(sorted(below))}, which come after it"


@pytest.mark.parametrize(
    "text",
    [
        "from fedcir.cli import main",
        "import fedcir.cli",
        "from fedcir import cli",
        "def f():\n    from fedcir.cli import main",
        "if TYPE_CHECKING:\n    from fedcir.cli import main",
    ],
)
def test_every_way_to_import_is_seen(text: str) -> None:
    assert list(layers_imported(ast.parse(text), {"cli"})) == ["cli"]


def test_the_version_is_no_room() -> None:
    assert list(layers_imported(ast.parse("from fedcir import __version__"), {"cli"})) == []


METHODS = sorted(
    path for path in (SOURCE / "algorithms").glob("*.py") if path.name not in ("__init__.py", "algorithm.py")
)


@pytest.mark.parametrize("file", METHODS, ids=lambda path: path.stem)
def test_a_methods_file_defines_the_class_of_its_name_and_no_other(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert [node.name.lower() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] == [file.stem]
