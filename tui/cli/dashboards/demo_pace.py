"""`Pace`: keeps the load of `stepscope demo` to what the machine carries, while it runs.

Other programs slow a machine down, and that changes while the demo runs: a build begins or ends.
After an operator changes a knob or the workload, `Pace` no longer changes the load.
"""

import threading
import time
from collections.abc import Callable

from stepscope.engine.client.errors import CommandRefused, EngineUnreachable
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.workload.arrivals import describe
from stepscope.recordings.history.history import History
from stepscope.tui.cli.dashboards.demo_rate import DemoLoad, next_offer

TICK_S = 1.0  # between two looks for a change by an operator
# The machine is another one when the steps of so many windows in a row say so: what a neighbour
# does for a few seconds is no reason to change the load, what goes on for half a minute is one.
WINDOW_S = 7.0
NUM_WINDOWS = 3
# After a change nothing is judged for so long, because batches fill up and caches warm up. The time
# doubles with each change, so that the load does not follow a machine whose speed goes up and down.
FIRST_REST_S = 8.0
LONGEST_REST_S = 64.0


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
        offered: DemoLoad,
        history: History,
        set_workload: Callable[[WorkloadSpec], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.offers = [offered]  # the last one runs
        self._usual = usual
        self._history = history
        self._set_workload = set_workload
        self._clock = clock
        self._unsure: DemoLoad | None = None  # sent, without an answer
        self._ours = {describe(offered.workload)}  # every workload we sent
        self._is_seen = False  # telemetry shows a workload a moment after it was set
        self._found: list[DemoLoad] = []  # by the last windows, all of them more or all less
        self._window_end_s = 0.0
        self._rest_s = FIRST_REST_S
        self._knobs_version = 0
        self._is_theirs = False
        self._num_reported = 0
        self._has_told_theirs = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-pace", daemon=True)

    def start(self, adapts: bool) -> None:
        """Begin with what is offered, and stay with it unless it `adapts`.

        Raises:
            EngineUnreachable, CommandRefused: the engine does not take it.
        """
        self._knobs_version = self._history.state.knobs_version
        self._set_workload(self.offers[0].workload)
        self._window_end_s = self._clock() + self._rest_s + WINDOW_S
        if adapts:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def news(self) -> str | None:
        """The notice since the last call, if any; call it from one thread only."""
        if self._num_reported < len(self.offers):
            self._num_reported = len(self.offers)
            return f"the demo's workload: {self.offers[-1]}"
        if self._is_theirs and not self._has_told_theirs:
            self._has_told_theirs = True
            return "you control the load from now on: the demo no longer fits it to the machine"
        return None

    def look(self) -> bool:
        """Change the workload if needed; False once another client controls it.

        Raises:
            EngineUnreachable: the engine did not answer, and may have taken it all the same.
            CommandRefused: it did not take it.
        """
        state = self._history.state
        if state.knobs_version != self._knobs_version or not self._is_ours(state.workload):
            self._is_theirs = True
            return False
        if self._unsure is not None and state.workload == describe(self._unsure.workload):
            self._began(self._unsure)
        now_s = self._clock()
        if state.state not in ("running", "idle"):
            self._found.clear()
            self._window_end_s = now_s + WINDOW_S
        elif self._is_seen and now_s >= self._window_end_s:
            self._window_end_s = max(self._window_end_s, now_s - TICK_S) + WINDOW_S
            if (wanted := self._wanted()) is not None:
                self._ask(wanted)
        return True

    def _is_ours(self, workload: str | None) -> bool:
        self._is_seen = self._is_seen or workload in self._ours
        return workload in self._ours or not self._is_seen

    def _wanted(self) -> DemoLoad | None:
        """By the window that ends now and those before it."""
        now, info = self.offers[-1], self._history.info
        rates = self._history.rates(window_s=WINDOW_S)
        found = None if info is None else next_offer(now, self._usual, info, rates)
        if found is None:
            self._found.clear()
            return None
        if self._found and _is_more(found, now) != _is_more(self._found[-1], now):
            self._found.clear()
        self._found.append(found)
        if len(self._found) < NUM_WINDOWS:
            return None
        # The machine changed at some time within the first of the windows.
        by_rate = sorted(self._found, key=lambda each: each.workload.rate)
        self._found.clear()
        return by_rate[NUM_WINDOWS // 2]

    def _ask(self, wanted: DemoLoad) -> None:
        said = describe(wanted.workload)
        is_new = said not in self._ours
        self._ours.add(said)  # before it is taken, for an answer may be lost
        self._unsure = wanted
        try:
            self._set_workload(wanted.workload)
        except CommandRefused:
            self._unsure = None
            if is_new:
                self._ours.remove(said)
            raise
        self._began(wanted)

    def _began(self, offered: DemoLoad) -> None:
        self._unsure = None
        self._found.clear()
        self.offers.append(offered)
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        self._window_end_s = self._clock() + self._rest_s + WINDOW_S

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            try:
                if not self.look():
                    return
            except (EngineUnreachable, CommandRefused):
                continue  # it is ending, or another client changed it first


def _is_more(offered: DemoLoad, now: DemoLoad) -> bool:
    return offered.workload.rate > now.workload.rate
