"""`Session`: one engine or recording in the dashboard, with everything that its screen needs.

`AlertWatch` checks its alert rules.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.engine.client.client import ControlClient
from stepscope.engine.transport.endpoints import Endpoint, siblings_of
from stepscope.recordings.alerts.judge import Judge, Meter, RuleChange
from stepscope.recordings.alerts.rule import Rule
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source, add_mark
from stepscope.tui.session.compare_state import CompareState
from stepscope.tui.session.engine_link import EngineLink
from stepscope.tui.session.operator import AutopilotSwitch
from stepscope.tui.session.record_switch import FileJobs, RecordSwitch, RecordSwitches
from stepscope.tui.session.tour import Tour
from stepscope.tui.settings.action_table import Action, Need
from stepscope.tui.settings.actions import ACTIONS, Abilities
from stepscope.tui.settings.preferences import Preferences, Value
from stepscope.tui.settings.terminal import in_browser, log_path
from stepscope.tui.views.frame.fleet_view import FleetView

if TYPE_CHECKING:
    from stepscope.recordings.live.recorder import Recorder

_LOOK_S = 1.0


class AlertWatch:
    """Checks the rules on a live source, and marks the step at which one begins to fire."""

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
        changes = self._judge.apply(self._meter.measure(), now_s)
        for change in changes:
            if change.is_firing and self._source.history.last_step is not None:
                add_mark(self._source, change.text, "alert")
        return changes

    @property
    def standing(self) -> list[str]:
        now_s = self._clock()
        return [
            f"ALERT {each.rule.said(each.value)}, for {now_s - each.fired_s:,.0f} s"
            for each in self._judge.firing
            if each.fired_s is not None
        ]


# Settings that fit one recording: a choice made in a replay is not kept for the next session.
_OF_A_REPLAY = frozenset({"axis", "sort", "slo_ttft_ms", "slo_itl_ms"})


@dataclass(slots=True)
class Session:
    """One engine or recording, and what its screen and dialogs share.

    `Dashboard` explains the arguments; `beside` makes the session of another engine.
    """

    source: Source
    control_endpoint: str | None
    recorder: InitVar["Recorder | None"]
    # Shared by all sessions of a dashboard:
    fleet_view: FleetView
    readonly: bool = False
    actions: tuple[Action, ...] = ACTIONS
    preferences: Preferences = field(default_factory=Preferences)
    log_file: Path = field(default_factory=log_path)
    clock: Callable[[], float] = time.monotonic
    rules: Sequence[Rule] = ()
    compare: CompareState = field(default_factory=CompareState)
    exports: FileJobs = field(default_factory=FileJobs)
    switches: RecordSwitches = field(default_factory=RecordSwitches)
    # Of this session alone:
    abilities: Abilities = field(init=False)
    endpoint: str = field(init=False)  # as people read it, without the folder of a socket
    link: EngineLink | None = field(init=False)  # None if there is no engine to change
    autopilot: AutopilotSwitch | None = field(init=False)  # the same
    alerts: AlertWatch = field(init=False)
    tour: Tour | None = field(init=False, default=None)
    background_error: str | None = field(init=False, default=None)  # why a thread died, in one line

    def __post_init__(self, recorder: "Recorder | None") -> None:
        control = self.control_endpoint
        needs: set[Need] = {"live" if self.source.is_live else "replay"}
        if self.switches.of(self.source, recorder) is not None:
            needs.add("recorder")
        if not in_browser():
            needs.add("files")
        self.link, self.autopilot, self.endpoint = None, None, self.source.name
        if control is not None:
            needs.add("engine")
            scheme, _, path = control.partition("://")
            self.endpoint = f"ipc://{Path(path).name}" if scheme == "ipc" else control
            if not self.readonly:
                self.link = EngineLink(
                    partial(ControlClient, control), lambda: siblings_of(Endpoint.parse(control))
                )
                self.autopilot = AutopilotSwitch(control)
        self.abilities = Abilities(self.readonly, frozenset(needs), self.actions)
        self.alerts = AlertWatch(self.source, self.rules, self.clock)

    @property
    def history(self) -> History:
        """The steps in memory."""
        return self.source.history

    def beside(self, source: Source, control_endpoint: str | None) -> "Session":
        """Return a new session of another source of this dashboard."""
        return replace(self, source=source, control_endpoint=control_endpoint, recorder=None)

    def begin_tour(self, tour: Tour) -> None:
        """Start to show a guided tour, and enable its keys."""
        self.tour = tour
        self.abilities = replace(self.abilities, has=self.abilities.has | {"tour"})

    def prefer(self, name: str, value: Value) -> None:
        """Save a setting for the next start of the dashboard, if `keeps` allows it."""
        if self.keeps(name):
            self.preferences.set(name, value)

    def keeps(self, name: str) -> bool:
        """Whether this setting is saved for the next start; in a replay some settings are not."""
        return (self.source.is_live or name not in _OF_A_REPLAY) and self.preferences.has(name)

    @property
    def record_switch(self) -> RecordSwitch | None:
        """What starts and ends recordings of this source; None if the source is not live."""
        return self.switches.of(self.source)
