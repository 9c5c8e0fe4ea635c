"""CSV that a spreadsheet may open: no cell is a formula, numbers are numbers, and we read it back."""

import csv
import io
from pathlib import Path

import pytest

from fedcir.data.partition import read_owners
from fedcir.reporting.page import to_csv
from fedcir.text import escape_cell, unescape_cell

TEXTS = ["=cmd|' /C calc'!A0", "+x", "-x", "@SUM(A1)", "\tx", "\r=x", "'=x", "''-x", "-", "--1", "+1.2 ± 0.3"]


@pytest.mark.parametrize("cell", TEXTS)
def test_a_text_that_a_spreadsheet_would_run_begins_with_an_apostrophe_and_is_read_back(cell: str) -> None:
    assert escape_cell(cell) == f"'{cell}"
    assert unescape_cell(escape_cell(cell)) == cell


@pytest.mark.parametrize("cell", ["-0.5", "+3", "-1e-7", "-inf", "12", "", "a=b", "x", "'quoted'", "ink"])
def test_numbers_and_other_texts_stay_as_they_are(cell: str) -> None:
    assert escape_cell(cell) == unescape_cell(cell) == cell


def test_tables_of_a_report_hold_no_formula() -> None:
    written = to_csv([["domain", "change"], ["=1+1", "-0.25"]])
    assert list(csv.reader(io.StringIO(written)))[1] == ["'=1+1", "-0.25"]


def test_our_own_tables_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "owners.csv"
    path.write_text(to_csv([["path", "client"], ["=a/1.png", "+site"], ["b/2.png", "pen"]]))
    assert read_owners(path) == {"=a/1.png": "+site", "b/2.png": "pen"}
