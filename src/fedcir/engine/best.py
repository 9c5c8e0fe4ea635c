"""Which round of a run was the best, and which one's model is saved."""

from collections.abc import Sequence

from fedcir.types import RoundRecord


def best_of(records: Sequence[RoundRecord]) -> RoundRecord | None:
    """The first round of the highest mean accuracy, on validation images where there are any; None if none was tested.

    Those images are not tested on, so the round that they pick is not picked on what it is measured by.
    """
    tested = [record for record in records if record.accuracy_mean is not None]
    aside = any(record.validation for record in tested)
    return max(tested, key=lambda record: (_to_pick_by(record, aside), -record.round), default=None)


def round_to_save(records: Sequence[RoundRecord], keep: str) -> int:
    """The round whose model is saved: the last of the records, or the best on validation images; never by a test."""
    last = records[-1].round if records else 0
    if keep == "last":
        return last
    best = best_of([record for record in records if record.validation])
    return last if best is None else best.round


def _to_pick_by(record: RoundRecord, aside: bool) -> float:
    if not aside:
        return record.accuracy_mean or 0.0
    return sum(record.validation.values()) / len(record.validation) if record.validation else 0.0
