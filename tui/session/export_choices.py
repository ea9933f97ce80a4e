"""What the export key can export from a session, and into which folder."""

import os
from collections.abc import Iterable
from pathlib import Path

from stepscope.engine.protocol.wire import Mark
from stepscope.recordings import samples
from stepscope.tui.session.export.order import RangeChoice
from stepscope.tui.session.session import Session
from stepscope.tui.session.time.navigator import recorded_extent
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import clean

_NOTE_WIDTH = 24


def recording_of(session: Session) -> Path | None:
    """Return the replayed file, or the engine's current or last recording, or None."""
    recording = getattr(session.source, "recording", None)
    if recording is not None:
        return Path(recording.path)
    switch = session.record_switch
    if switch is None or switch.path is None:
        return None
    # While recording, the steps are in the .part file. An older file may have the final name; it
    # is replaced when the recording ends.
    part = switch.path.with_name(switch.path.name + ".part")
    return part if switch.active and part.exists() else switch.path


def ranges_of(session: Session, frame: Frame | None, marks: Iterable[Mark]) -> list[RangeChoice]:
    """Return the step ranges to choose from: all, those on the screen, those since a mark."""
    extent = recorded_extent(session.source)
    switch = session.record_switch
    whole = "the whole recording"
    if extent is not None:
        whole += f", {_steps(*extent)}"
    elif switch is not None and switch.active:
        whole += " so far"
    found = [RangeChoice(whole)]
    if frame is None or frame.cursor is None:
        return found
    cursor = frame.cursor
    shown = [column for column in frame.columns if column is not None]
    if shown:
        first, last = shown[0].first, shown[-1].last
        found.append(RangeChoice(f"what is on the screen, {_steps(first, last)}", first, last))
    mark = max((each for each in marks if each.step < cursor), key=_step, default=None)
    if mark is not None:
        end = "newest step" if frame.view.live and not frame.is_replay else "cursor"
        text = f"from mark '{clean(mark.text, _NOTE_WIDTH)}' to the {end}"
        found.append(RangeChoice(f"{text}, {_steps(mark.step, cursor)}", mark.step, cursor))
    return found


def folder_for(path: Path) -> Path:
    """Return the recording's folder; the current one if it is not writable or has samples."""
    folder = path.absolute().parent
    is_shipped = folder == Path(samples.__file__).absolute().parent
    return Path.cwd() if is_shipped or not os.access(folder, os.W_OK) else folder


def _steps(first: int, last: int) -> str:
    return f"steps {first:,} to {last:,}"


def _step(mark: Mark) -> int:
    return mark.step
