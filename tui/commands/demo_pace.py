"""`Pace`: keeps the load of `stepscope demo` to what the machine carries, while it runs.

A machine is as fast as its neighbours let it be, and that changes: an installation ends, a build
begins. As soon as somebody has changed a knob or the workload, the load is theirs and stays.
"""

import threading
import time
from collections.abc import Callable

from stepscope.engine.client import CommandRefused, EngineUnreachable
from stepscope.engine.commands import WorkloadSpec
from stepscope.engine.workload import describe
from stepscope.recordings.history import History
from stepscope.tui.commands.demo_rate import Offer, next_offer

LOOK_S = 5.0
# So long a rate stays, and so far back steps are looked at: first so that a bad moment at the start
# is made good soon, then twice as long each time, for what goes on and off is no change.
FIRST_STAY_S = 15.0
LONGEST_STAY_S = 60.0


class Pace:
    """A thread from `start` to `stop`.

    Args:
        usual: the workload of a machine that is fast enough.
        offered: what is running.
        history: of the session.
        set_workload: asks the engine for another.
    """

    def __init__(
        self,
        usual: WorkloadSpec,
        offered: Offer,
        history: History,
        set_workload: Callable[[WorkloadSpec], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.offers = [offered]  # the last one runs
        self._usual = usual
        self._history = history
        self._set_workload = set_workload
        self._clock = clock
        self._since_s = 0.0  # the last one has run
        self._stay_s = FIRST_STAY_S
        self._knobs_version = 0
        self._num_told = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-pace", daemon=True)

    def start(self, adapts: bool) -> None:
        """Begin with what is offered, and stay with it unless it `adapts`.

        Raises:
            EngineUnreachable, CommandRefused: the engine does not take it.
        """
        self._knobs_version = self._history.state.knobs_version
        self._set_workload(self.offers[0].workload)
        self._since_s = self._clock()
        if adapts:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def news(self) -> str | None:
        """What there is to say since the last call; for one thread."""
        if self._num_told == len(self.offers):
            return None
        self._num_told = len(self.offers)
        return f"the demo's workload: {self.offers[-1]}"

    def look(self) -> bool:
        """Change the workload if that is called for; False when it is ours no more.

        Raises:
            EngineUnreachable, CommandRefused: the engine did not take it.
        """
        state, offered = self._history.state, self.offers[-1]
        known = {describe(each.workload) for each in self.offers}
        if state.knobs_version != self._knobs_version or state.workload not in known:
            return False
        if state.state != "running" or self._clock() - self._since_s < self._stay_s:
            return True
        found = next_offer(offered, self._usual, self._history.rates(window_s=self._stay_s))
        if found is not None:
            self._set_workload(found.workload)
            self.offers.append(found)
            self._since_s = self._clock()
            self._stay_s = min(2 * self._stay_s, LONGEST_STAY_S)
        return True

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            try:
                if not self.look():
                    return
            except (EngineUnreachable, CommandRefused):
                continue  # it is ending, or somebody else was quicker
