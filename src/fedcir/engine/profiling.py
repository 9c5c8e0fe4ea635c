"""Where a run's time went: by phase, and within the steps by operation."""

from collections.abc import Iterable, Iterator, Sequence

from torch.profiler import ProfilerActivity, profile

from fedcir.engine.cost import ledger
from fedcir.types import RoundRecord

OPERATIONS = 4


class Profile:
    """Watches the second round of a run (or the only one) closely, and all of them from afar."""

    def __init__(self) -> None:
        self._records: list[RoundRecord] = []
        self._operations: list[tuple[str, float]] = []

    def watch(self, rounds: Iterable[RoundRecord], left: int) -> Iterator[RoundRecord]:
        """The same rounds; `left` is how many there are."""
        iterator = iter(rounds)
        for number in range(left):
            if number != min(1, left - 1):
                record = next(iterator)
            else:
                with profile(activities=[ProfilerActivity.CPU]) as watched:
                    record = next(iterator)
                self._operations = [(event.key, event.self_cpu_time_total) for event in watched.key_averages()]
            self._records.append(record)
            yield record
        yield from iterator  # none is left, but the run is finished only then

    def rows(self) -> Sequence[tuple[str, float]]:
        """Shares of the time: by phase over all rounds, then by operation in one round of this process."""
        seconds = dict(ledger(self._records).seconds)
        total = seconds.pop("total", 0.0) or 1.0
        phases = [(phase, value / total) for phase, value in seconds.items()]
        spent = sum(value for _, value in self._operations) or 1.0
        largest = sorted(self._operations, key=lambda each: -each[1])[:OPERATIONS]
        return [*phases, *((name, value / spent) for name, value in largest)]
