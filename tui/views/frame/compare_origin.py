"""`Origin`: where one of two compared runs is stored, so that it can be read and opened."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from stepscope.recordings.compare.side.feed import Feed, Stretch
from stepscope.recordings.compare.side.history_feed import HistoryFeed
from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import SLO


class Origin(NamedTuple):
    """A stretch of a recording (`path`) or of memory (`history`), which may be shown already."""

    name: str
    slo: SLO
    path: Path | None = None
    history: History | None = None
    stretch: Stretch = Stretch()
    is_shown: bool = False
    make_feed: Callable[[], Feed] | None = None  # for data that must first be made (a simulation)

    def feed(self) -> Feed:
        """Return a new reader of this run; raise RecordingError if the recording cannot be read."""
        if self.make_feed is not None:
            return self.make_feed()
        if self.history is not None:
            return HistoryFeed(self.history, self.name, self.slo, self.stretch)
        from stepscope.recordings.compare.side.recording_feed import RecordingFeed
        from stepscope.recordings.file.reader import Recording  # with mcap, only when needed

        assert self.path is not None
        return RecordingFeed(Recording(self.path), self.name, self.slo, self.stretch)
