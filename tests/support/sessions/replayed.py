"""`replayed`: a replay of a recording, for as long as a `with` block lasts; how to go to a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.replay.seek import Reach


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


@contextmanager
def short_histories() -> Iterator[tuple[Event, Event]]:
    """Replays extend their history only once the second event is set; the first: one has to."""
    reached, go_on = Event(), Event()
    extend = Reach.extend

    def slowly(reach: Reach, *where: Any) -> None:
        reached.set()
        assert go_on.wait(60)
        extend(reach, *where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reach, "extend", slowly)
        try:
            yield reached, go_on
        finally:
            go_on.set()
