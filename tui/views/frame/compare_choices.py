"""The choices in the list "compare the session on the screen with what?".

These are the session's own parts before and after a mark or change, recordings, and samples. A
landmark is a mark, or a change of knobs or of the workload. An `Origin` says where a run is stored.
`ComparePage`: what the page with a comparison is drawn from; words for each of the two runs
("sides"): how much work, and why its late tokens were late.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings import samples
from stepscope.recordings.attribution.causes import WORDS
from stepscope.recordings.compare.columns import Align
from stepscope.recordings.compare.comparison import Comparison, SideWork
from stepscope.recordings.compare.division import Landmark, divide, landmark_of, landmarks
from stepscope.recordings.compare.side.feed import Feed, HistoryFeed
from stepscope.recordings.compare.side.points import StepPoint
from stepscope.recordings.compare.side.requests import Pair
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SIMULATED
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.compare_text import percent


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
        from stepscope.recordings.compare.side.recording_feed import RecordingFeed
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
    files = {path: status for path, status in _recordings(folders) if path not in shipped}
    newest = sorted(files, key=lambda path: -files[path].st_mtime)
    for path in [path for path in newest if path != own][:MAX_FILES]:
        status = files[path]
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        detail = f"{when}, {fmt.size(status.st_size)}, {path.parent}"
        both = session, file_origin(path, session)
        found.append(CompareChoice("recording", path.name, detail, both))
    for path in [path for path in shipped if path != own]:
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


class Split(NamedTuple):
    """Where to split a session: at the landmark `mark`, one of all that were `found`."""

    mark: Landmark
    found: list[Landmark]


def split_origins(
    session: Origin, mark: Landmark, found: Iterable[Landmark]
) -> tuple[Origin, Origin]:
    """Return a session before and after `mark`, each up to the next change in `found`."""
    before, after = divide(mark, found)
    return (
        session._replace(name=before.name, stretch=before.stretch),
        session._replace(name=after.name, stretch=after.stretch),
    )


def _split(session: Origin, mark: Landmark, found: Iterable[Landmark]) -> CompareChoice:
    origins = split_origins(session, mark, found)
    first, last = origins[0].stretch.first, origins[1].stretch.last
    detail = f"before and after step {mark.step:,}"
    if first is not None and last is not None:
        detail += f", of {first:,} to {last:,}"
    elif first is not None or last is not None:
        detail += f", from {first:,} on" if first is not None else f", up to {last:,}"
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


SIDES: tuple[Literal["a", "b"], ...] = ("a", "b")
_CAUSES = ((3, 2), (2, 2), (2, 1), (1, 1), (1, 0), (0, 1), (0, 0))  # numbers of causes: ITL, TTFT


def sizes(found: Comparison, width: int) -> str:
    """Return the number of requests and the duration of both runs; empty if there is no room."""
    num_a, num_b = (fmt.count(work.num_requests) for work in found.works)
    both_a, both_b = (_requests(work) for work in found.works)
    a, b = (fmt.span(work.seconds) for work in found.works)
    in_a, in_b = ("" if work.simulated is None else f" {SIMULATED}," for work in found.works)
    texts = (
        f"A{in_a} {both_a} in {a}, B{in_b} {both_b} in {b}",
        f"A {num_a} requests {a}, B {num_b} {b}",
        f"requests {num_a} {a} | {num_b} {b}",
        f"A {num_a}, B {num_b} requests",
    )
    return fmt.first_fitting((*texts, ""), width)


def work_text(work: SideWork) -> str:
    how = "" if work.simulated is None else f"{SIMULATED}, "
    unit = "records" if work.sums_up else "steps"
    return (
        f"{how}{work.num_steps:,} {unit} in {fmt.span(work.seconds)}, "
        f"{_requests(work)}, "
        f"{fmt.count(work.num_in_tokens)} tokens in, {fmt.count(work.num_out_tokens)} out"
    )


def _requests(work: SideWork) -> str:
    if work.num_requests is None:
        return "— requests"
    before = work.num_requests - (work.num_arrived or work.num_requests)
    from_before = f" ({before:,} from before)" if before > 0 else ""
    return fmt.plural(work.num_requests, "request") + from_before


def late(found: Comparison, side: Literal["a", "b"], width: int) -> str:
    """Return how many tokens of one run were late, the total wait, and as many causes as fit."""
    text = ""
    for num_itl, num_ttft in _CAUSES:
        itl = causes_of(found, "ITL", side, num_itl)
        ttft = causes_of(found, "TTFT", side, num_ttft)
        text = f"ITL: {itl}  │  TTFT: {ttft}" if ttft != "none" else f"ITL: {itl}"
        if len(text) <= width:
            break
        text = text.replace(" of waiting", "").replace("  │  ", " │ ")
        if len(text) <= width:
            break
    return text


def causes_of(found: Comparison, kind: str, side: Literal["a", "b"], limit: int = 3) -> str:
    """Return a line on a run's late tokens: how many, the total wait, `limit` main causes."""
    shares = [share for share in found.causes if share.kind == kind]
    total_ns = sum(share.a_ns if side == "a" else share.b_ns for share in shares)
    number = sum(share.num_a if side == "a" else share.num_b for share in shares)
    if not number or not total_ns:
        within = found.figure(f"{kind.lower()}_within_slo")
        known = within.a if side == "a" else within.b
        if known is None:
            return "unknown"
        return "none" if known == 1 else "of unknown cause"
    mine = sorted(shares, key=lambda share: -(share.a_ns if side == "a" else share.b_ns))
    parts = [
        f"{WORDS[share.cause].name} {percent(spent_ns / total_ns)}"
        for share in mine[:limit]
        if (spent_ns := share.a_ns if side == "a" else share.b_ns) >= total_ns / 100
    ]
    late = f"{number:,} late, {total_ns / 1e9:,.1f} s of waiting"
    return f"{late}: {', '.join(parts)}" if parts else late


def bound_of(found: Comparison, kind: str) -> float:
    return found.slo.itl_ms if kind == "ITL" else found.slo.ttft_ms


SideName: TypeAlias = Literal["a", "b"]


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
