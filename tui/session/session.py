"""`Session`: one engine or recording in the dashboard, with everything that its screen needs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepscope.recordings.alerts.rule import Rule
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.tui.session.alerts import AlertDesk
from stepscope.tui.session.compare.desk import CompareDesk
from stepscope.tui.session.control.autopilot_switch import AutopilotSwitch
from stepscope.tui.session.control.engine_link import EngineLink
from stepscope.tui.session.export.desk import ExportDesk
from stepscope.tui.session.recording.record_switch import RecordSwitch
from stepscope.tui.session.recording.record_switches import RecordSwitches
from stepscope.tui.session.tour.tour import Tour
from stepscope.tui.settings.actions import Abilities
from stepscope.tui.settings.log_file import log_path
from stepscope.tui.settings.preferences import Preferences, Value
from stepscope.tui.views.frame.fleet_desk import FleetDesk

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
    desk: FleetDesk  # all engines of this dashboard, including this one
    compare: CompareDesk = field(default_factory=CompareDesk)  # shared by all engines
    exports: ExportDesk = field(default_factory=ExportDesk)  # shared by all engines
    preferences: Preferences = field(default_factory=Preferences)
    log_file: Path = field(default_factory=log_path)
    clock: Callable[[], float] = time.monotonic
    rules: Sequence[Rule] = ()
    tour: Tour | None = None
    autopilot: AutopilotSwitch | None = None  # None if there is no engine to change
    background_error: str | None = None  # why a thread died, in one line
    alerts: AlertDesk = field(init=False)

    def __post_init__(self) -> None:
        self.alerts = AlertDesk(self.source, self.rules, self.clock)

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
