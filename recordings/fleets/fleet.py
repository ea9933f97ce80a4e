"""`Fleet`: several engines side by side. It owns the source of each engine and what is kept of it.

Each engine has its own `Subscriber`, with a thread and a short history: two minutes at 50 steps a
second. All histories together take at most `FLEET_BYTES`, unless there are so many that each gets
only its minimum, `_LEAST_BYTES`. The engine that the user opened last has a longer history, as in a
dashboard of a single engine.

`look` belongs to one thread, that of the screen, which calls it a few times a second.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from stepscope.recordings.fleets.figures import EngineFigures, figures, measure
from stepscope.recordings.fleets.imbalance import Imbalance, ImbalanceKeeper, differences
from stepscope.recordings.fleets.whole_lives import WholeLife, WholeLives
from stepscope.recordings.history.history import MAX_BYTES, MAX_STEPS
from stepscope.recordings.history.source import Source

FLEET_STEPS = 6_000  # most steps kept of each engine
FLEET_BYTES = 128 * 1024 * 1024  # most bytes kept of all engines together
_LEAST_BYTES = 2 * 1024 * 1024  # bytes kept of each engine in any case
LOOK_S = 0.5  # seconds between two samples of the load
NUM_LOADS = 240  # samples kept, two minutes
NEW_S = 60.0  # a restarted engine counts as new for so long
_MEASURE_S = 1.0
_NUM_EVENTS = 200
_SAID = {
    "stale": ("answers, but sends no telemetry", False),
    "starting": ("is starting: its process is there and does not listen yet", True),
}


def shared_bytes(num_engines: int) -> int:
    """How many bytes of messages may be kept of each engine."""
    return max(_LEAST_BYTES, FLEET_BYTES // max(1, num_engines))


class FleetEvent(NamedTuple):
    """An engine appeared, went down, fell silent, restarted, or changed its state (a pause)."""

    wall_s: float  # Unix time
    name: str
    text: str
    is_good: bool


class EngineLine(NamedTuple):
    """What was seen of one engine when `Fleet.look` last computed its picture."""

    figures: EngineFigures
    load: tuple[int | None, ...]  # its requests, one sample every LOOK_S, the newest last
    status_s: float  # how long it has had its present status
    silent_s: float | None  # time since its last message; None before the first
    new_s: float | None  # time since it restarted, up to NEW_S, else None


class FleetPicture(NamedTuple):
    """All engines, as of the last time that `Fleet.look` computed it."""

    lines: tuple[EngineLine, ...] = ()
    imbalances: tuple[Imbalance, ...] = ()
    differences: tuple[str, ...] = ()
    events: tuple[FleetEvent, ...] = ()  # oldest first
    now_s: float = 0.0  # by the same clock as `Imbalance.since_s`
    wall_s: float = 0.0
    lives: tuple[WholeLife, ...] = ()  # across prefill and decode engines
    lives_ns: int = 0  # the time of `lives`, by the engines' clock

    @property
    def num_up(self) -> int:
        return sum(line.figures.is_up for line in self.lines)


class _FleetMember:
    def __init__(self, source: Source, name: str, now_s: float, place: int) -> None:
        self.source = source
        self.name = name
        self.load: deque[int | None] = deque(maxlen=NUM_LOADS)
        self.measured: dict[str, Any] = {}
        self.measured_version = -1
        # Measuring is expensive, so half of the engines are measured in one look, half in the next.
        self.measure_due_s = now_s + place % 2 * LOOK_S
        self.figures = figures(name, source, {})
        self.status_since_s = now_s
        self.version = source.history.version
        self.heard_s: float | None = now_s if self.version else None
        self.engine_id: str | None = None
        self.new_since_s: float | None = None
        self.was_starting = False  # it was starting, and no event reports the outcome yet


class Fleet:
    """The engines that a dashboard watches.

    `newcomers`: returns a source, not yet started, for each engine that is new since its last call.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        newcomers: Callable[[], Sequence[Source]] = tuple,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._newcomers = newcomers
        self._opened: Source | None = None
        self._members: list[_FleetMember] = []
        self._keeper = ImbalanceKeeper()
        self._lives = WholeLives()
        self._events: deque[FleetEvent] = deque(maxlen=_NUM_EVENTS)
        self._look_due_s = 0.0
        self.picture = FleetPicture()
        for source in sources:
            self.add(source)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(member.source for member in self._members)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self._members)

    def add(self, source: Source) -> None:
        """Add an engine at the end. The caller must start its source."""
        taken = {member.name for member in self._members}
        name, number = source.name, 1
        while name in taken:
            number += 1
            name = f"{source.name}#{number}"
        self._members.append(_FleetMember(source, name, self._clock(), len(self._members)))
        self._changed()

    def remove(self, source: Source) -> None:
        """Remove an engine. The caller must stop its source."""
        self._members = [member for member in self._members if member.source is not source]
        self._changed()

    def _changed(self) -> None:
        self._keeper = ImbalanceKeeper()
        self._look_due_s = 0.0

    def start(self) -> None:
        for source in self.sources:
            source.start()

    def stop(self) -> None:
        """Stop all sources at the same time: one whose engine is dead takes a second."""
        with ThreadPoolExecutor(len(self) or 1) as pool:
            list(pool.map(lambda source: source.stop(), self.sources))

    def open(self, source: Source) -> None:
        """Keep a long history of this engine, and a short one of the others."""
        self._opened = source
        if len(self._members) < 2:
            return
        for member in self._members:
            if member.source is source:
                member.source.history.keep(MAX_STEPS, MAX_BYTES)
            else:
                member.source.history.keep(FLEET_STEPS, shared_bytes(len(self._members)))

    def take_in(self) -> None:
        """Add and start the engines that have appeared. Engines that are down are not removed."""
        for source in self._newcomers():
            self.add(source)
            source.start()
            self._say(self._members[-1], "has appeared", True)
            self.open(self._opened or self._members[0].source)

    def look(self) -> FleetPicture:
        """Return the current picture of all engines. It is computed at most once every `LOOK_S`."""
        now_s = self._clock()
        if now_s < self._look_due_s and self.picture.lines:
            return self.picture
        self._look_due_s = now_s + LOOK_S
        for member in self._members:
            self._look_at(member, now_s)
        lines = tuple(self._line(member, now_s) for member in self._members)
        engines = [line.figures for line in lines]
        self.picture = FleetPicture(
            lines,
            tuple(self._keeper.update(engines, now_s)),
            tuple(differences(engines)),
            tuple(self._events),
            now_s,
            self._wall_clock(),
            self._lives.look(engines, [member.source.history.state for member in self._members]),
            self._lives.now_ns,
        )
        return self.picture

    def _look_at(self, member: _FleetMember, now_s: float) -> None:
        history = member.source.history
        version = history.version
        if version != member.version:
            member.version, member.heard_s = version, now_s
        if now_s >= member.measure_due_s and version != member.measured_version:
            member.measured = measure(history)
            member.measured_version, member.measure_due_s = version, now_s + _MEASURE_S
        before = member.figures
        member.figures = figures(member.name, member.source, member.measured)
        member.load.append(member.figures.load if member.figures.is_up else None)
        self._note_changes(member, before, now_s)

    def _note_changes(self, member: _FleetMember, before: EngineFigures, now_s: float) -> None:
        now, info = member.figures, member.figures.info
        engine_id = None if info is None else info.engine_id
        is_new = member.engine_id is not None and engine_id not in (None, member.engine_id)
        if engine_id is not None:
            member.engine_id = engine_id
        if now.status != before.status:
            member.status_since_s = now_s
        if now.status == "starting":
            member.was_starting = True
        if is_new:
            member.was_starting = False
            member.new_since_s, member.measured = now_s, {}
            pid = "" if info is None or info.pid is None else f" (pid {info.pid})"
            self._say(member, f"restarted{pid}: a new engine", True)
        elif now.status != before.status:
            if now.status == "live":
                if before.status in ("stale", "down") and member.heard_s is not None:
                    self._say(member, "is back, the same engine as before", True)
                elif member.was_starting:
                    self._say(member, "is up", True)
                member.was_starting = False
            elif now.status in _SAID:
                self._say(member, *_SAID[now.status])
            elif now.status == "down":
                why = now.error or "it does not answer"
                # The error may begin with the name of the engine; do not show it twice.
                own = why.removeprefix(f"{member.name} ")
                self._say(member, own if own != why else f"is down: {why}", False)
        elif now.is_up and before.is_up and now.state != before.state:
            if "paused" in (now.state, before.state):
                verb = "was paused" if now.state == "paused" else "goes on after a pause"
                self._say(member, verb, now.state != "paused")
            elif now.state in ("draining", "stopped"):
                self._say(member, f"is {now.state}", False)

    def _say(self, member: _FleetMember, text: str, is_good: bool) -> None:
        self._events.append(FleetEvent(self._wall_clock(), member.name, text, is_good))

    def _line(self, member: _FleetMember, now_s: float) -> EngineLine:
        new_s = None if member.new_since_s is None else now_s - member.new_since_s
        return EngineLine(
            member.figures,
            tuple(member.load),
            now_s - member.status_since_s,
            None if member.heard_s is None else now_s - member.heard_s,
            new_s if new_s is not None and new_s < NEW_S else None,
        )
