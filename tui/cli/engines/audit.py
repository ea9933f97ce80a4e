"""`stepscope snapshot --audit`: prints who changed an engine, from the engine or a recording."""

from collections.abc import Iterator
from typing import Any

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.audit_fold import side_by_side
from stepscope.engine.protocol.commands import GetAudit
from stepscope.engine.protocol.replies import AuditPage
from stepscope.engine.protocol.wire import Audited, EngineInfo, Snapshot
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.state.audit_text import change_text, who_text
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.errors import say, write_json
from stepscope.tui.cli.shared.recording_path import RECORDING_SUFFIXES, find_recording, is_recorded
from stepscope.tui.settings.cli_errors import CommandFailed
from stepscope.tui.views import format as fmt


def audit(target: str | None, as_json: bool) -> None:
    """Print the audit trail, oldest entry first.

    Args:
        target: a recording or sample, else an engine; None: the only local engine.
    """
    is_file = target is not None and (target.endswith(RECORDING_SUFFIXES) or _is_recording(target))
    info, entries, missing = _of_file(target or "") if is_file else _of_engine(target)
    if as_json:
        write_json([_as_dict(entry, info) for entry in entries])
        return
    if missing:
        say(missing)
    if not entries:
        say("no changes yet")
    say(*_lines(entries, info))


def _is_recording(target: str) -> bool:
    try:
        return is_recorded(find_recording(target))
    except CommandFailed:
        return False


def _of_engine(target: str | None) -> tuple[EngineInfo, list[Audited], str]:
    with connect(choose(target, "stepscope snapshot {} --audit")) as client:
        info = client.info()
        entries: list[Audited] = []
        after, missing = 0, ""
        while True:
            page = client.ask(GetAudit(after=after))
            if not isinstance(page, AuditPage):
                raise CommandFailed(f"the engine answered with {type(page).__name__}")
            missing = missing or page.detail
            entries += page.entries
            if not page.entries or page.entries[-1].number >= page.newest:
                break
            after = page.entries[-1].number
    return info, entries, missing


def _of_file(target: str) -> tuple[EngineInfo, list[Audited], str]:
    found: dict[int, Audited] = {}
    kinds = (wire.TOPICS[Audited], wire.TOPICS[Snapshot])
    with Recording(find_recording(target)) as recording:
        info = recording.info
        for number in range(recording.num_chunks):
            for frame in recording.chunk_frames(number):
                # Of the snapshots, only the first is the engine's: it has the entries from before
                # the recording.
                if frame.topic not in kinds or (frame.topic == kinds[1] and number):
                    continue
                try:
                    message = wire.decode(frame.payload)
                except msgspec.DecodeError:
                    continue  # 'stepscope verify' reports it
                if isinstance(message, Audited):
                    found[message.number] = message
                elif isinstance(message, Snapshot):
                    found |= {each.number: each for each in message.audit or ()}
    entries = [found[number] for number in sorted(found)]
    num_missing = entries[0].number - 1 if entries else 0
    missing = f"the first {num_missing:,} entries are not in this file" if num_missing else ""
    return info, entries, missing


def _lines(entries: list[Audited], info: EngineInfo) -> Iterator[str]:
    for entry in side_by_side(entries):
        step = "refused" if entry.code else f"step {entry.effective_step or 0:,}"
        yield (
            f"{entry.number:>5}  {fmt.clock(_wall_ns(entry, info))}  {step:>14}  "
            f"{who_text(entry):<20}  {change_text(entry)}"
        )


def _wall_ns(entry: Audited, info: EngineInfo) -> int:
    return info.wall_ns + entry.time_ns - info.monotonic_ns


def _as_dict(entry: Audited, info: EngineInfo) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.structs.asdict(entry)
    document["wall_ns"] = _wall_ns(entry, info)
    return document
