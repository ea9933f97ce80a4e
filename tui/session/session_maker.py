"""`SessionMaker`: makes the session of each engine or recording that a dashboard shows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.engine.client.client import ControlClient
from stepscope.engine.transport.data_parallel import siblings_of
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.alerts.rule import Rule
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.tui.session.compare.state import CompareState
from stepscope.tui.session.control.autopilot_switch import AutopilotSwitch
from stepscope.tui.session.control.engine_link import EngineLink
from stepscope.tui.session.control.who import who
from stepscope.tui.session.export.jobs import FileJobs
from stepscope.tui.session.recording.record_switches import RecordSwitches
from stepscope.tui.session.session import Session
from stepscope.tui.settings.action_table import Action, Need
from stepscope.tui.settings.actions import ACTIONS, Abilities
from stepscope.tui.settings.log_file import log_path
from stepscope.tui.settings.preferences import Preferences
from stepscope.tui.views.frame.fleet_view import FleetView

if TYPE_CHECKING:
    from stepscope.recordings.live.recorder import Recorder


@dataclass(frozen=True, slots=True)
class SessionMaker:
    """Makes sessions; its fields are what all sessions share.

    `run_dashboard` explains the fields.
    """

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
