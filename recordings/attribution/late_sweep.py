"""`LateSweep`: explains all late tokens of a range of steps in one pass that can be continued.

To explain each token alone, its whole wait would have to be read, and the waits of an overloaded
engine overlap.
"""

from collections.abc import Callable
from typing import NamedTuple

from stepscope.recordings.attribution.causes import Late
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.state.session import SessionState


class LateWait(NamedTuple):
    """A wait to explain."""

    step: int  # the step that ended the wait
    request_id: int
    start_ns: int


class LateSweep:
    """Feeds messages to an explainer of all requests, and notes how far it has read.

    Args:
        state: the state before the first message.
        number: the number of the first message.
    """

    def __init__(self, explainer: Explainer, state: SessionState, number: int) -> None:
        self._explainer = explainer
        self._begin_ns = state.time_ns
        self._number = number
        self.step = state.step  # the last step read

    def num_steps_for(self, first_ns: int, first_step: int, last_step: int) -> int | None:
        """How many more steps to read to explain waits that began at or after `first_ns`.

        None if this sweep began too late or has already read `first_step`.

        Args:
            first_step, last_step: the range of steps in which the waits end.
        """
        if self._begin_ns > first_ns or self.step >= first_step:
            return None
        return last_step - self.step

    def go_on(self, last_step: int, feed: Callable[[Explainer, int, int], int]) -> list[Late]:
        """Continue to `last_step`. Returns the new late waits, except those begun before the sweep.

        Args:
            feed: a function that feeds an explainer the messages from a number up to the record of
                a step, and returns the number of the next message.
        """
        explainer = self._explainer
        self._number = feed(explainer, self._number, last_step)
        self.step = max(self.step, last_step)
        found = [late for late in explainer.late if late.start_ns >= self._begin_ns]
        explainer.late.clear()
        return found
