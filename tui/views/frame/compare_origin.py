"""`Origin`: where one side of a comparison comes from, so that it can be read, and opened."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from stepscope.recordings.compare.side.feed import Feed, Stretch
from stepscope.recordings.compare.side.history_feed import HistoryFeed
from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import SLO


class Origin(NamedTuple):
    """A stretch of a recording or of a session in memory; one of `path` and `history` is set.

    Attributes:
        is_shown: the dashboard shows this session anyway.
    """

    name: str
    slo: SLO
    path: Path | None = None
    history: History | None = None
    stretch: Stretch = Stretch()
    is_shown: bool = False
    make_feed: Callable[[], Feed] | None = None  # for what must be made before it can be read

    def feed(self) -> Feed:
        """A reader of it, from its beginning.

        Raises:
            RecordingError: it cannot be read.
        """
        if self.make_feed is not None:
            return self.make_feed()
        if self.history is not None:
            return HistoryFeed(self.history, self.name, self.slo, self.stretch)
        from stepscope.recordings.compare.side.recording_feed import RecordingFeed
        from stepscope.recordings.file.reader import Recording  # with mcap, only when needed

        assert self.path is not None
        return RecordingFeed(Recording(self.path), self.name, self.slo, self.stretch)
