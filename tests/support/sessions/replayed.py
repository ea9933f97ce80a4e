"""`replayed`: a replay of a recording, for as long as a `with` block lasts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.replay import ReplaySource


@contextmanager
def replayed(file: Path, history: History | None = None) -> Iterator[ReplaySource]:
    """A replay that stands at the first step of the file."""
    with Recording(file) as recording:
        source = ReplaySource(recording, history, playing=False)
        source.start()
        try:
            assert source.wait(30)
            yield source
        finally:
            source.stop()


def seek(source: ReplaySource, step: int) -> None:
    """Go to a step, or to the last one of the file, and wait until the history has it."""
    source.seek(step)
    assert source.wait(30)
