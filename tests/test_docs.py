"""The docs agree with the code: generated tables, names of files, and a site that builds without warnings."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedcir.experiments.paper import EXPERIMENTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
spec = importlib.util.spec_from_file_location("docs_fields", DOCS / "fields.py")
assert spec is not None
assert spec.loader is not None
fields = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fields)


@pytest.mark.slow
def test_the_tables_of_every_page_are_current() -> None:
    """One test, because pages share what is computed for a method."""
    texts = {page.stem: page.read_text(encoding="utf-8") for page in fields.PAGES}
    assert [
        page for page, text in texts.items() if not (fields.BETWEEN.search(text) or fields.FIGURE.search(text))
    ] == []
    assert [page for page, text in texts.items() if fields.with_tables(text) != text] == [], "run `make docs`"


def test_the_page_of_experiments_counts_their_runs() -> None:
    text = (DOCS / "reproduce.md").read_text(encoding="utf-8")
    for id, experiment in EXPERIMENTS.items():
        made = [experiment.cases(scale, ["pacs"], None, None, {}) for scale in ("paper", "small", "smoke")]
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{id}` ")]
        assert row.endswith(f"| {' / '.join(str(len(item)) for item in made)} |")


PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|toml))?|[\w-]+\.py)`")
"""A path in backticks: a file in a folder, a folder, or a top-level module."""


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_the_source_files_that_a_page_names_exist(page: Path) -> None:
    """Names such as `prox.py`, which the user writes, come without a folder and are skipped except in design.md."""
    paths = PATH.findall(page.read_text(encoding="utf-8"))
    if page.stem != "design":
        paths = [path for path in paths if path.startswith(("src/", "tests/", "benchmarks/", "results/", "examples/"))]
    roots = (ROOT, ROOT / "src" / "fedcir", ROOT / "src" / "fedcir" / "data", ROOT / "src" / "fedcir" / "experiments")
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


def test_every_name_of_the_api_page_exists() -> None:
    names = re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    for module, _, name in (path.rpartition(".") for path in names):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_every_module_in_the_table_of_moves_exists() -> None:
    modules = re.findall(r"^\| `([\w/]+)` \|", (DOCS / "redesign.md").read_text(encoding="utf-8"), re.MULTILINE)
    source = ROOT / "src" / "fedcir"
    assert [name for name in modules if not (source / f"{name}.py").exists() and not (source / name).is_dir()] == []


@pytest.mark.slow
def test_the_documentation_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=DOCS.parent, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert "fedcir.train" in (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
