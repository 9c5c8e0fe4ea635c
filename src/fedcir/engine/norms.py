"""Whether a reply is far longer than the usual one: then it takes no part, whatever the server makes of the others.

The usual length is the median over the replies of the round, as far as they are there. The first replies wait for each
other, so that it is known from the start, and not set by a bad client that comes first. There is nothing to remember
from round to round.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from fedcir.models.tensors import update_norm
from fedcir.types import ClientReply, Dropped, Groups

AHEAD = 8
"""Replies that wait for each other, which bounds the memory they take."""
SMALL = 0.01
"""No update is called long that is shorter than this share of the model, times the limit: most may have converged."""

Norms = dict[str, float]
"""Lengths by what they are of: the update of "model", its "model statistics", or another group."""


class Screen:
    """Drops replies that are too long; `factor` 0 drops none."""

    def __init__(self, sent: Groups, trained: Sequence[str], factor: float) -> None:
        self._sent, self._factor = {group: sent[group] for group in trained}, factor
        self._least = {part: SMALL * norm for part, norm in self._norms(self._sent, update=False).items()}
        self._seen: list[Norms] = []

    def screened(self, replies: Iterable[ClientReply | Dropped]) -> Iterator[ClientReply | Dropped]:
        """The same replies in the same order, those that are too long as dropped."""
        waiting: list[tuple[ClientReply | Dropped, Norms]] = []
        for reply in replies:
            norms = self._norms(reply.arrays) if self._factor and isinstance(reply, ClientReply) else {}
            waiting.append((reply, norms))
            if norms:
                self._seen.append(norms)
            if len(self._seen) >= AHEAD or not self._factor:
                yield from self._judged(waiting)
                waiting = []
        yield from self._judged(waiting)

    def _judged(self, waiting: Iterable[tuple[ClientReply | Dropped, Norms]]) -> Iterator[ClientReply | Dropped]:
        for reply, norms in waiting:
            reason = self._fault(norms)
            yield reply if reason is None else Dropped(reply.client_id, reason)

    def _fault(self, norms: Norms) -> str | None:
        alone = len(self._seen) == 1  # with nobody to compare it with, only the model
        for part, norm in norms.items():
            others = 0.0 if alone else statistics.median_low(each[part] for each in self._seen)  # bad ones are long
            usual = max(others, self._least.get(part, 0.0))
            # What else is uploaded grows with a client's data, and statistics differ as the data do.
            limit = self._factor**2 if alone or part not in self._sent else self._factor
            if usual and norm > limit * usual:
                what = f"update of {part}" if part in self._sent else part
                return (
                    f"the norm of its {what} is {norm:.3g}, {norm / usual:.3g} times the usual {usual:.3g}; "
                    f"server.max_update allows {limit:g} times, and a lower local.lr may help an honest client"
                )
        return None

    def _norms(self, arrays: Groups, update: bool = True) -> Norms:
        norms = {}
        for group, bag in arrays.items():
            sent = self._sent.get(group, {}) if update else {}
            norms[group] = update_norm(bag, sent)
            if group in self._sent:
                norms[f"{group} statistics"] = update_norm(bag, sent, statistics=True)
        return norms
