"""`KnobsInForce`: the values that knobs had in a run."""

from collections.abc import Mapping

from stepscope.engine.protocol.wire import KnobValue

_MAX_VALUES = 8  # most values given of a knob, the last ones


class KnobsInForce:
    """Collects the changes of knobs in a session.

    Args:
        before: the values at its beginning.
    """

    def __init__(self, before: Mapping[str, KnobValue]) -> None:
        self._before = dict(before)
        self._changes: list[tuple[int, Mapping[str, KnobValue]]] = []
        self._newest = dict(before)

    def add(self, step: int, values: Mapping[str, KnobValue]) -> None:
        changed = {name: value for name, value in values.items() if self._newest.get(name) != value}
        if changed:
            self._changes.append((step, changed))
            self._newest |= changed

    def between(self, first: int, last: int) -> dict[str, list[KnobValue]]:
        """For each knob, the values that it had in these steps, in order (the last few)."""
        in_force = dict(self._before)
        for step, values in self._changes:
            if step <= first:
                in_force |= values
        found = {name: [value] for name, value in in_force.items()}
        for step, values in self._changes:
            if first < step <= last:
                for name, value in values.items():
                    found[name] = [*found.get(name, ()), value][-_MAX_VALUES:]
        return found
