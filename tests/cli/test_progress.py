"""What the lines of a run say of the time left."""

import pytest

from fedcir.cli.progress import Display
from fedcir.types import RoundRecord


def test_loading_before_round_1_does_not_count_for_the_rounds_to_come(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"train": 1.0, "load": 3600.0, "total": 3601.0}
    with Display(quiet=False, every=True) as display:
        display.begin("run", 4)
        display.show("run", RoundRecord(1, {}, None, None, None, None, 0, 0, 0, seconds, {}))
    assert capsys.readouterr().err.rstrip().endswith("0:03 left")  # three rounds of a second
