"""The pages of the methods say what their classes say."""

import importlib.util
from pathlib import Path

import pytest

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
