"""`Judge`: decides which rules fire. A rule whose condition flaps fires only once."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.alerts.rule import Rule

CALM_S = 10.0  # firing ends after so long without holding, or after the rule's `for` if longer

RuleState: TypeAlias = Literal["unknown", "ok", "pending", "firing"]


class RuleChange(NamedTuple):
    """A rule has begun or stopped firing.

    Attributes:
        is_firing: whether it has begun.
        value: at the beginning, the value that made it fire; at the end, the worst value.
        seconds: at the end, the time from when it fired until its condition stopped being true.
    """

    rule: Rule
    is_firing: bool
    value: float | None
    seconds: float = 0.0

    @property
    def text(self) -> str:
        if self.is_firing:
            return self.rule.said(self.value)
        return f"{self.rule.said(self.value)} at worst, over after {self.seconds:.0f} s"


class RuleWatch:
    """Follows one rule over time.

    Attributes:
        value: the newest value of the rule's figure; None if unknown.
        worst: the worst value since the rule began to fire; None if it does not fire.
        fired_s: when the rule began to fire; None if it does not fire.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.value: float | None = None
        self.worst: float | None = None
        self.fired_s: float | None = None
        self._held_since_s: float | None = None
        self._calm_since_s: float | None = None
        self._is_known = False

    @property
    def state(self) -> RuleState:
        if self.fired_s is not None:
            return "firing"
        if not self._is_known:
            return "unknown"
        return "ok" if self._held_since_s is None else "pending"

    @property
    def holds(self) -> bool:
        """Whether the rule's condition was true at the last measurement."""
        return self._held_since_s is not None

    def apply(self, values: Mapping[str, float | None], now_s: float) -> RuleChange | None:
        """Process the next measurement, name -> value.

        If it lacks the rule's figure, nothing changes.

        Returns:
            The change, if the rule begins or stops firing.
        """
        rule = self.rule
        if rule.figure not in values:
            return None
        self._is_known = True
        self.value = value = values[rule.figure]
        if value is None or not rule.bound.holds(value):
            return self._calm(now_s)
        self._calm_since_s = None
        if self._held_since_s is None:
            self._held_since_s = now_s
        if self.fired_s is not None:
            is_upper = rule.bound.relation in (">", ">=")
            self.worst = (max if is_upper else min)(
                value if self.worst is None else self.worst, value
            )
        elif now_s - self._held_since_s >= rule.for_s:
            self.fired_s, self.worst = now_s, value
            return RuleChange(rule, True, value)
        return None

    def _calm(self, now_s: float) -> RuleChange | None:
        self._held_since_s = None
        if self.fired_s is None:
            return None
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s - self._calm_since_s < max(CALM_S, self.rule.for_s):
            return None
        change = RuleChange(self.rule, False, self.worst, self._calm_since_s - self.fired_s)
        self.fired_s = self.worst = self._calm_since_s = None
        return change


class Judge:
    """Judges all rules of one source."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.watches = [RuleWatch(rule) for rule in rules]

    def apply(self, values: Mapping[str, float | None], now_s: float) -> list[RuleChange]:
        """Process the next measurement.

        Returns a change for each rule that begins or stops firing.
        """
        changes = [watch.apply(values, now_s) for watch in self.watches]
        return [change for change in changes if change is not None]

    @property
    def firing(self) -> list[RuleWatch]:
        return [watch for watch in self.watches if watch.fired_s is not None]
