"""The pages of the methods say what their classes say, and that of the experiments what they take."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from fedcir.insight.experiments import experiment, ids
from fedcir.insight.experiments.plan import cases

DOCS = Path(__file__).parents[1] / "docs"
spec = importlib.util.spec_from_file_location("docs_fields", DOCS / "fields.py")
assert spec is not None
assert spec.loader is not None
fields = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fields)


def test_the_tables_of_every_page_are_current() -> None:
    """One test, since pages share what is looked up of a method."""
    texts = {page.stem: page.read_text(encoding="utf-8") for page in fields.PAGES}
    assert [page for page, text in texts.items() if not fields.BETWEEN.search(text)] == []
    assert [page for page, text in texts.items() if fields.with_tables(text) != text] == [], "run `make docs`"


def test_the_page_of_experiments_counts_their_runs() -> None:
    text = (DOCS / "reproduce.md").read_text(encoding="utf-8")
    for id in ids():
        made = [cases(experiment(id), scale, ["pacs"], None, None, {}) for scale in ("paper", "small", "smoke")]
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{id}` ")]
        assert row.endswith(f"| {' / '.join(str(len(each)) for each in made)} |")


def test_the_documentation_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=DOCS.parent, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert "fedcir.train" in (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
