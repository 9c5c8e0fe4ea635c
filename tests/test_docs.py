"""The pages of the methods say what their classes say, and that of the experiments what they take."""

import importlib.util
from pathlib import Path

import pytest

from fedcir.insight.experiments import experiment, ids
from fedcir.insight.experiments.plan import cases

DOCS = Path(__file__).parents[1] / "docs"
spec = importlib.util.spec_from_file_location("docs_fields", DOCS / "fields.py")
assert spec is not None
assert spec.loader is not None
fields = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fields)


@pytest.mark.parametrize("page", fields.PAGES, ids=lambda page: page.stem)
def test_the_tables_of_fields_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fields.BETWEEN.search(text)
    assert fields.with_tables(text) == text, "run `make docs`"


def test_the_page_of_experiments_counts_their_runs() -> None:
    text = (DOCS / "reproduce.md").read_text(encoding="utf-8")
    for id in ids():
        made = [cases(experiment(id), scale, ["pacs"], None, None, {}) for scale in ("paper", "small", "smoke")]
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{id}` ")]
        assert row.endswith(f"| {' / '.join(str(len(each)) for each in made)} |")
