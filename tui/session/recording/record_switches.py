"""`RecordSwitches`: starts and ends recordings of all engines of a dashboard.

That includes engines whose screen was never opened.
"""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.recordings.history.source import Source
from stepscope.tui.session.recording.record_switch import RecordSwitch

if TYPE_CHECKING:
    from stepscope.recordings.live.recorder import Recorder


class RecordSwitches:
    """One `RecordSwitch` for each live source, made on first use. Use it only on the UI thread.

    Args:
        folder: where the files go; by default the folder in which the dashboard was started.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path.cwd()
        self._switches: dict[Source, RecordSwitch] = {}

    def of(self, source: Source, recorder: "Recorder | None" = None) -> RecordSwitch | None:
        """Return the switch of a source; None if the source is not live.

        Args:
            recorder: a recording of the source that already runs.
        """
        if not source.is_live:
            return None
        if source not in self._switches:
            self._switches[source] = RecordSwitch(source, self._folder, recorder)
        return self._switches[source]

    @property
    def active(self) -> Collection[Source]:
        """The sources that are being recorded."""
        return [source for source, switch in self._switches.items() if switch.active]

    @property
    def errors(self) -> dict[Source, str]:
        """Source -> why its recording has ended by itself, for errors that were not seen yet."""
        found = {source: switch.error for source, switch in self._switches.items()}
        return {source: error for source, error in found.items() if error is not None}

    def seen(self, source: Source | None) -> None:
        """Note that the operator has pressed a key: errors on the screen count as seen.

        Args:
            source: the source whose error is on the screen; None means all sources.
        """
        for each, switch in self._switches.items():
            if source is None or each is source:
                switch.seen()

    def stop(self) -> None:
        """End all recordings; for each, a thread of its own finishes the file."""
        for switch in self._switches.values():
            switch.stop()

    def last(self) -> list[str]:
        """Return a summary of the last recording of each source. Call it after `stop`."""
        summaries = [switch.last() for switch in self._switches.values()]
        return [line for line in summaries if line is not None]
