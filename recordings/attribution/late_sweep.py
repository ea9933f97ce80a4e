"""`LateSweep`: explains all late tokens of a range of steps in one pass that can be continued.

To explain each token alone, its whole wait would have to be read, and the waits of an overloaded
engine overlap. `Breach`: a step with late tokens; `worst_of_seconds`: those with the longest waits.
Late tokens come in swarms, so one per second is enough for a list from which people jump to steps.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.attribution.causes import Late
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.state.session import SessionState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SECOND_NS = 1_000_000_000


class Breach(NamedTuple):
    """A step with tokens later than a bound, and the longest wait for one of these tokens."""

    step: int
    time_ns: int
    kind: str  # TTFT or ITL
    ns: int  # length of the wait without the operator's pauses
    request_id: int
    num_tokens: int = 1  # late tokens of this kind in the step


def worst_of_seconds(
    times_ns: "NDArray[np.int64]", waits_ns: "NDArray[np.int64]"
) -> "NDArray[np.int64]":
    """The places of the longest wait of each second of engine time; of equal ones the first.

    `times_ns`: when the waits ended, in order.
    """
    import numpy as np

    seconds = times_ns // _SECOND_NS
    firsts = np.flatnonzero(np.append(True, seconds[1:] != seconds[:-1])[: len(seconds)])
    second_of = np.repeat(firsts, np.diff(firsts, append=len(seconds)))
    longest = np.zeros_like(waits_ns)
    longest[firsts] = np.maximum.reduceat(waits_ns, firsts) if len(firsts) else 0
    places = np.flatnonzero(waits_ns == longest[second_of])
    return places[np.unique(second_of[places], return_index=True)[1]]


class LateWait(NamedTuple):
    step: int  # the step that ended the wait
    request_id: int
    start_ns: int


class LateSweep:
    """Feeds messages to an explainer of all requests, and notes how far it has read."""

    def __init__(self, explainer: Explainer, state: SessionState, number: int) -> None:
        self._explainer = explainer
        self._begin_ns = state.time_ns
        self._number = number
        self.step = state.step  # the last step read

    def num_steps_for(self, first_ns: int, first_step: int, last_step: int) -> int | None:
        """How many more steps to read for waits since `first_ns`; None: it began too late."""
        if self._begin_ns > first_ns or self.step >= first_step:
            return None
        return last_step - self.step

    def go_on(self, last_step: int, feed: Callable[[Explainer, int, int], int]) -> list[Late]:
        """Continue to `last_step`. Returns the new late waits, except those begun before the sweep.

        `feed`: a function that feeds an explainer the messages from a number up to the record of a
        step, and returns the number of the next message.
        """
        explainer = self._explainer
        self._number = feed(explainer, self._number, last_step)
        self.step = max(self.step, last_step)
        found = [late for late in explainer.late if late.start_ns >= self._begin_ns]
        explainer.late.clear()
        return found
