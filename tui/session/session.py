"""`Session`: one engine or recording in the dashboard, with everything that its screen needs.

`SessionMaker` makes them; `AlertWatch` checks the alert rules of one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from stepscope.tui.session.control.autopilot_switch import AutopilotSwitch
from stepscope.tui.session.control.engine_link import EngineLink
from stepscope.tui.session.control.who import who
from stepscope.tui.session.file_jobs import FileJobs
from stepscope.tui.session.record_switch import RecordSwitch, RecordSwitches
from stepscope.tui.session.tour.tour import Tour
from stepscope.tui.settings.action_table import Action, Need
from stepscope.tui.settings.actions import ACTIONS, Abilities
from stepscope.tui.settings.preferences import Preferences, Value
from stepscope.tui.settings.terminal import in_browser, log_path
from stepscope.tui.views.frame.fleet_view import FleetView

if TYPE_CHECKING:
    from stepscope.recordings.live.recorder import Recorder

_LOOK_S = 1.0
_WHO = "alert"


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
                add_mark(self._source, change.text, _WHO)
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
    """One engine or recording, and what its screen and dialogs share. `SessionMaker` makes it."""

    source: Source
    history: History
    link: EngineLink | None
    switches: RecordSwitches  # shared by all engines of this dashboard
    abilities: Abilities
    title: str
    endpoint: str
    fleet_view: FleetView  # all engines of this dashboard, including this one
    compare: CompareState = field(default_factory=CompareState)  # shared by all engines
    exports: FileJobs = field(default_factory=FileJobs)  # shared by all engines
    preferences: Preferences = field(default_factory=Preferences)
    log_file: Path = field(default_factory=log_path)
    clock: Callable[[], float] = time.monotonic
    rules: Sequence[Rule] = ()
    tour: Tour | None = None
    autopilot: AutopilotSwitch | None = None  # None if there is no engine to change
    background_error: str | None = None  # why a thread died, in one line
    alerts: AlertWatch = field(init=False)

    def __post_init__(self) -> None:
        self.alerts = AlertWatch(self.source, self.rules, self.clock)

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


@dataclass(frozen=True, slots=True)
class SessionMaker:
    """Makes sessions; its fields are what all sessions share, as `run_dashboard` explains."""

    fleet_view: FleetView
    title: str
    readonly: bool = False
    actions: tuple[Action, ...] = ACTIONS
    preferences: Preferences = field(default_factory=Preferences)
    log_file: Path = field(default_factory=log_path)
    clock: Callable[[], float] = time.monotonic
    rules: Sequence[Rule] = ()
    compare: CompareState = field(default_factory=CompareState)
    exports: FileJobs = field(default_factory=FileJobs)
    switches: RecordSwitches = field(default_factory=RecordSwitches)

    def make(
        self,
        source: Source,
        history: History,
        control_endpoint: str | None,
        recorder: "Recorder | None" = None,
    ) -> Session:
        """Return a new session of this source; `run_dashboard` explains the arguments."""
        needs: set[Need] = {"live" if source.is_live else "replay"}
        if control_endpoint is not None:
            needs.add("engine")
        if self.switches.of(source, recorder) is not None:
            needs.add("recorder")
        if not in_browser():
            needs.add("files")
        link = autopilot = None
        if control_endpoint is not None and not self.readonly:
            link = EngineLink(
                partial(ControlClient, control_endpoint),
                lambda: siblings_of(Endpoint.parse(control_endpoint)),
            )
            autopilot = AutopilotSwitch(control_endpoint, who)
        return Session(
            source,
            history,
            link,
            self.switches,
            Abilities(self.readonly, frozenset(needs), self.actions),
            self.title,
            shown_endpoint(control_endpoint) or source.name,
            self.fleet_view,
            self.compare,
            self.exports,
            preferences=self.preferences,
            log_file=self.log_file,
            clock=self.clock,
            rules=self.rules,
            autopilot=autopilot,
        )


def shown_endpoint(control: str | None) -> str | None:
    """Return an address as people read it: an IPC address without the folder of its socket."""
    if control is None or not control.startswith("ipc://"):
        return control
    return f"ipc://{Path(control.removeprefix('ipc://')).name}"
