"""`KnobVariation`: moves one knob for some seconds of each minute, then restores its value.

A recording that has steps under several token budgets can answer how another budget would do.
"""

from typing import NamedTuple

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import CommandRefused, EngineUnreachable
from stepscope.engine.protocol.wire import KnobValue

PERIOD_S = 60.0
_SHARE = 0.25  # part of a period during which the knob has another value than the engine's own


class KnobRange(NamedTuple):
    """A knob, and the lowest and highest value to move it to."""

    name: str
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "KnobRange":
        """Parse the text KNOB=LOW..HIGH.

        Raises:
            ValueError: the text has another form; the message says what was expected.
        """
        name, _, bounds = text.partition("=")
        low, dots, high = bounds.partition("..")
        if not (name and dots and low.isdigit() and high.isdigit() and 0 < int(low) < int(high)):
            raise ValueError(f"expected KNOB=LOW..HIGH, whole numbers above 0, got {text!r}")
        return cls(name, int(low), int(high))

    def values(self) -> list[int]:
        """Return the lowest value, the geometric mean and the highest value, each only once."""
        return sorted({self.low, round((self.low * self.high) ** 0.5), self.high})


class KnobVariation:
    """Moves one knob of an engine by the clock.

    Call `tick` a few times a second, and `close` at the end.

    Attributes:
        ended: why the variation has ended by itself; None while it goes on.

    Args:
        client: belongs to the thread that calls `tick`; the caller closes it.
        who: the name to show in the engine's audit trail.

    Raises:
        CommandRefused: the engine has no such knob, or refuses one of the values.
    """

    def __init__(
        self, client: ControlClient, knob: KnobRange, who: str, period_s: float = PERIOD_S
    ) -> None:
        self.ended: str | None = None
        self._client = client
        self._knob = knob.name
        self._who = who
        self._period_s = period_s
        snapshot = client.snapshot()
        if knob.name not in snapshot.knobs:
            raise CommandRefused("unknown_knob", f"the engine has no knob {knob.name}")
        self._own = snapshot.knobs[knob.name]
        self._version: int | None = snapshot.knobs_version
        self._current: KnobValue = self._own
        self._values = [value for value in knob.values() if value != self._own]
        for value in self._values:
            client.set_knobs({knob.name: value}, who, dry_run=True)

    def tick(self, elapsed_s: float) -> None:
        """Set the knob to the value that is due `elapsed_s` after the start."""
        self._set(self._due(elapsed_s))

    def close(self) -> None:
        """Restore the value from before the start, unless another client has changed a knob."""
        self._set(self._own)

    def _due(self, elapsed_s: float) -> KnobValue:
        """Return the value that the knob should have now.

        A period is divided into equal parts, one per value. The value is due in the middle of its
        part; in the rest of the part, the value from before the start is due.
        """
        part_s = self._period_s / len(self._values)
        number, within_s = divmod(elapsed_s % self._period_s, part_s)
        is_due = abs(within_s / part_s - 0.5) < _SHARE / 2
        return self._values[int(number)] if is_due else self._own

    def _set(self, value: KnobValue) -> None:
        if self.ended is not None or value == self._current:
            return
        try:
            # With the expected version: if an operator has changed a knob, this is refused.
            ack = self._client.set_knobs({self._knob: value}, self._who, self._version)
        except (CommandRefused, EngineUnreachable) as error:
            self.ended = f"{self._knob} is no longer varied: {error}"
            return
        self._version, self._current = ack.version, value
