"""Where one ingress's requests wait for room on decode replicas: in order, and only the first one asks.

The counterpart of `path/line.py`, on virtual time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_serve.sim.clock import Clock

if TYPE_CHECKING:
    from pd_serve.sim.request import Run


class Line:
    """Places in line; `True` in front of those that wait for their turn, not for a change."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._places: dict[Run, bool] = {}

    def __len__(self) -> int:
        return len(self._places)

    def turn(self, run: Run) -> bool:
        """Whether nobody waits in front. Else the run joins, and `plan` is called when it is its turn."""
        if not self._places or next(iter(self._places)) is run:
            return True
        self._places[run] = True
        return False

    def join(self, run: Run) -> None:
        """There was no room: wait for it, behind those who wait already. Idempotent."""
        self._places.setdefault(run, False)

    def leave(self, run: Run) -> None:
        """It has what it waited for, or does not want it any more. Idempotent."""
        if self._places.pop(run, None) is None or not self._places:
            return
        first = next(iter(self._places))
        if self._places[first]:
            self._places[first] = False
            self._clock.after(0.0, first.plan)
