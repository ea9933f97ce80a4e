"""The choices in the list "compare the session on the screen with what?".

These are the session's own parts before and after a mark or change, recordings, and samples. A
landmark is a mark, or a change of knobs or of the workload. An `Origin` says where a run is stored.
`ComparePage`: what the page with a comparison is drawn from.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepscope.recordings import samples
from stepscope.recordings.compare.columns import Align
from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.division import Landmark, divide, landmark_of, landmarks
from stepscope.recordings.compare.feed import Feed, HistoryFeed
from stepscope.recordings.compare.points import StepPoint
from stepscope.recordings.compare.side_requests import Pair
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.recordings.state.latency import SLO
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.compare_text import SideName


class Origin(NamedTuple):
    """A stretch of a recording (`path`) or of memory (`history`), which may be shown already."""

    name: str
    slo: SLO
    path: Path | None = None
    history: History | None = None
    stretch: StepRange = StepRange()
    is_shown: bool = False

    def feed(self) -> Feed:
        """Return a new reader of this run; raise RecordingError if the recording cannot be read."""
        if self.history is not None:
            return HistoryFeed(self.history, self.name, self.slo, self.stretch)
        from stepscope.recordings.compare.recording_feed import RecordingFeed
        from stepscope.recordings.file.reader import Recording  # with mcap, only when needed

        assert self.path is not None
        return RecordingFeed(Recording(self.path), self.name, self.slo, self.stretch)


MAX_SPLITS, MAX_FILES = 8, 12


class CompareChoice(NamedTuple):
    """An entry of the list and its runs; without them, first ask for a file."""

    kind: str
    name: str
    detail: str
    origins: tuple[Origin, Origin] | None


def choices(
    source: Source, folders: Iterable[Path], recorded: Iterable[Landmark] = ()
) -> list[CompareChoice]:
    """Return all entries: the session's parts, by all that was `recorded`, recordings, samples."""
    session = session_origin(source)
    known = _landmarks(source, recorded)
    found = [_split(session, each, known) for each in known if each.kind != "workload"][:MAX_SPLITS]
    own = None if session.path is None else session.path.absolute()
    shipped = sorted(Path(samples.__file__).parent.absolute().glob("*.mcap"))
    files = {path: each for path, each in _recordings(folders) if path not in (*shipped, own)}
    newest = sorted(files.items(), key=lambda each: -each[1].st_mtime)
    for path, status in newest[:MAX_FILES]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        detail = f"{when}, {fmt.size(status.st_size)}, {path.parent}"
        both = session, file_origin(path, session)
        found.append(CompareChoice("recording", path.name, detail, both))
    for path in shipped:
        if path != own:
            both = session, file_origin(path, session)
            found.append(CompareChoice("sample", path.stem, "shipped with stepscope", both))
    return [*found, CompareChoice("file", "another file …", "type its name", None)]


def session_origin(source: Source) -> Origin:
    """Return the `Origin` of the shown session: a whole replayed file, or the session in memory."""
    recording = getattr(source, "recording", None)
    slo = source.history.slo
    if recording is not None:
        path = Path(recording.path)
        return Origin(path.name.removesuffix(".mcap"), slo, path=path, is_shown=True)
    info = source.history.info
    name = source.name if info is None else info.name
    return Origin(name, slo, history=source.history, is_shown=True)


def file_origin(path: Path, session: Origin) -> Origin:
    return Origin(path.name.removesuffix(".mcap"), session.slo, path=path)


def split_origins(
    session: Origin, mark: Landmark, found: Iterable[Landmark]
) -> tuple[Origin, Origin]:
    """Return a session before and after `mark`, each up to the next change in `found`."""
    a, b = (session._replace(name=each.name, stretch=each.stretch) for each in divide(mark, found))
    return a, b


def _split(session: Origin, mark: Landmark, found: Iterable[Landmark]) -> CompareChoice:
    origins = split_origins(session, mark, found)
    first, last = origins[0].stretch.first, origins[1].stretch.last
    detail = f"before and after step {mark.step:,}"
    detail += "" if first is None else f", from {first:,} on"
    detail += "" if last is None else f", up to {last:,}"
    return CompareChoice(mark.kind, mark.text, detail, origins)


def _landmarks(source: Source, recorded: Iterable[Landmark]) -> list[Landmark]:
    """Return the landmarks of a session, newest first, without those at its first step."""
    recording = getattr(source, "recording", None)
    history = source.history
    first = history.first_step if recording is None else recording.first_step
    found = list(recorded)
    for message in (*history.marks, *history.knob_changes, *history.state.audit):
        mark = landmark_of(message)
        if mark is not None and mark not in found:
            found.append(mark)
    found = [each for each in found if first is not None and each.step > first]
    found.sort(key=lambda each: -each.step)
    return found


def _recordings(folders: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    for path in (path for folder in folders for path in folder.glob("*.mcap")):
        with contextlib.suppress(OSError):  # the file may have been deleted meanwhile
            if path.is_file():
                yield path.absolute(), path.stat()


class LandmarkSearch:
    """Finds the landmarks of a recording on a thread; `found` is None until it is done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Landmark] | None = None
        threading.Thread(target=self._run, name="marks of a recording", daemon=True).start()

    def _run(self) -> None:
        from stepscope.recordings.file.reader import Recording  # with mcap, only when needed

        try:
            with Recording(self.path) as recording:
                self.found = list(landmarks(recording))
        except (RecordingError, OSError):
            self.found = []  # the caller reports the error when it opens the file


class ComparePage(NamedTuple):
    """The data of the comparison page, taken at one moment. Pairs hold run A, then run B.

    Attributes:
        comparison: the result so far; None until some of each run has been read, and while the
            operator has chosen nothing.
        choices: what to compare with, while the operator chooses; else None.
        shares: the share of each run that has been read; None for a run that still grows.
        columns: the columns of the charts of A and B, from left to right; None where a run has no
            step.
    """

    names: tuple[str, str]
    comparison: Comparison | None
    choices: list[CompareChoice] | None
    is_reading: bool
    was_cancelled: bool
    shares: tuple[float | None, float | None]
    notes: list[str]
    align: Align
    focus: SideName
    columns: tuple[list[StepPoint | None], list[StepPoint | None]]
    start: int  # the offset of the first column on the common axis
    width: int
    cursor: int
    cursor_column: int
    points: tuple[StepPoint | None, StepPoint | None]
    selected: int  # index into `comparison.requests.pairs`, or into `choices`
    pair: Pair | None
