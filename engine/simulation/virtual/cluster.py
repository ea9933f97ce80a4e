"""`run_cluster`: routes requests to one or several simulated engines, and runs them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.simulation.virtual.requests import SimulatedRequest

Routing: TypeAlias = Literal["round-robin", "least-loaded"]


class TimedKnobs(NamedTuple):
    """Knobs to set on every engine at a given time."""

    time_ns: int
    knobs: Knobs


class Engine(Protocol):
    """A simulated engine: a `Replica`, or a `SimulatedSession`, which publishes its steps."""

    @property
    def num_unfinished(self) -> int: ...

    def submit(self, wanted: SimulatedRequest) -> None: ...

    def set_knobs(self, knobs: Knobs, time_ns: int) -> None: ...

    def run_until(self, time_ns: int) -> None: ...

    def run_to_end(self) -> None: ...


def run_cluster(
    engines: Sequence[Engine],
    requests: Iterable[SimulatedRequest],
    *,
    routing: Routing = "round-robin",
    changes: Sequence[TimedKnobs] = (),
    on_request: Callable[[int], bool] = lambda number: False,
) -> bool:
    """Send each request to an engine at its arrival, and run all engines until they are done.

    Args:
        requests: in the order of their arrivals.
        changes: in the order of their times.
        on_request: called with the number of each request before it arrives; True ends the run.

    Returns:
        Whether `on_request` ended the run early.
    """
    upcoming = list(reversed(changes))
    for number, request in enumerate(requests):
        if on_request(number):
            return True
        while upcoming and upcoming[-1].time_ns <= request.arrival_ns:
            _change(engines, upcoming.pop())
        for engine in engines:
            engine.run_until(request.arrival_ns)
        chosen = number % len(engines)
        if routing == "least-loaded":
            chosen = min(range(len(engines)), key=lambda each: engines[each].num_unfinished)
        engines[chosen].submit(request)
    while upcoming:
        _change(engines, upcoming.pop())
    for engine in engines:
        engine.run_to_end()
    return False


def _change(engines: Sequence[Engine], change: TimedKnobs) -> None:
    for engine in engines:
        engine.run_until(change.time_ns)
        engine.set_knobs(change.knobs, change.time_ns)
