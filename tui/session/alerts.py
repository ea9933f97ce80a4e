"""`AlertDesk`: checks the alert rules of the config file while a dashboard is open.

A rule is a condition on a figure of the engine; it fires when the condition has held for a while.
"""

from collections.abc import Callable, Sequence

from stepscope.recordings.alerts.judge import Judge, RuleChange
from stepscope.recordings.alerts.meter import Meter
from stepscope.recordings.alerts.rule import Rule
from stepscope.recordings.history.source import Source, add_mark

_LOOK_S = 1.0
_WHO = "alert"


class AlertDesk:
    """Checks the alert rules, and puts a mark at the newest step when a rule begins to fire.

    Use it only on the UI thread.

    Args:
        source: the rules are checked only if it is live.
        clock: returns seconds.
    """

    def __init__(self, source: Source, rules: Sequence[Rule], clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock
        self._judge = Judge(rules if source.is_live else ())
        self._meter = Meter(source, clock)
        self._next_s = 0.0

    def news(self) -> list[RuleChange]:
        """Check the rules; return those that have begun or ceased to fire since the last call."""
        now_s = self._clock()
        if not self._judge.watches or now_s < self._next_s:
            return []
        self._next_s = now_s + _LOOK_S
        changes = self._judge.take(self._meter.measure(), now_s)
        for change in changes:
            if change.is_firing and self._source.history.last_step is not None:
                add_mark(self._source, change.text, _WHO)
        return changes

    @property
    def standing(self) -> list[str]:
        """One line of text for each rule that fires now."""
        now_s = self._clock()
        return [
            f"ALERT {each.rule.said(each.value)}, for {now_s - each.fired_s:,.0f} s"
            for each in self._judge.firing
            if each.fired_s is not None
        ]
