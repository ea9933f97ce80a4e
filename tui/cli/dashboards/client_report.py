"""Prints what the requests of a load generator waited for: before, in and after the engine."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.importing.client_match import (
    NEAR_NS,
    ClientMatch,
    ClientWait,
    ClientWaits,
    client_match,
    client_waits,
)
from stepscope.recordings.importing.imported import client_result
from stepscope.recordings.importing.source import ForeignSession
from stepscope.recordings.state.session import request_name
from stepscope.tui.cli.shared.output import note, say, text_table, write_json
from stepscope.tui.cli.shared.paths import find_recording

_RANKS = (50, 95, 99)
_NUM_WORST = 5


def open_client(file: str, recording: Recording) -> tuple[ForeignSession, ClientMatch]:
    session = client_result(Path(file))
    note(session.note)
    return session, client_match(session, recording)


def print_split(file: str, client: str, as_json: bool) -> None:
    """Print how the client's TTFT and ITL divide, at some ranks and of the longest ones."""
    with Recording(find_recording(file)) as recording:
        note(recording.message)
        session, match = open_client(client, recording)
    found = client_waits(match)
    tables = {of.kind: list(_rows(of)) if of.waits else [] for of in found}
    if as_json:
        told = {**match._asdict(), "pairs": len(match.pairs)}
        all_ttfts = [_row("", each, found[0]) for each in found[0].waits]
        write_json({"tool": session.info.engine, **told, **tables, "requests": all_ttfts})
        return
    say(f"{file} beside {client} ({session.info.engine})", *_summary(match))
    for kind, rows in tables.items():
        if rows:
            shown = [[_cell(value) for value in row.values()] for row in rows]
            say("", *text_table([f"{kind} ms", *list(rows[0])[1:]], shown))
        else:
            say("", f"{kind} unknown: the client's chunks are not told, or not the engine's steps")
    say("", "Each line but the mean is of one request, so that its parts add up.")


def _rows(of: ClientWaits) -> Iterator[dict[str, Any]]:
    client = fmean(each.ns for each in of.waits) / 1e6
    means = [fmean(parts) / 1e6 for parts in zip(*(w.parts_ns for w in of.waits), strict=True)]
    parts = dict(zip(of.names, means, strict=True))
    yield {"rank": "mean", "client": client, **parts, "request": None, "step": None}
    for rank in _RANKS:
        yield _row(f"p{rank}", of.at(rank), of)
    for number, each in enumerate(of.worst(_NUM_WORST)):
        yield _row("" if number else "worst", each, of)


def _row(rank: str, each: ClientWait, of: ClientWaits) -> dict[str, Any]:
    parts = {name: ns / 1e6 for name, ns in zip(of.names, each.parts_ns, strict=True)}
    of_engine = {"request": request_name(each.request_id), "step": each.step}
    return {"rank": rank, "client": each.ns / 1e6, **parts, **of_engine}


def _cell(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{round(value, 1) + 0.0:,.1f}"  # no -0.0
    return value if isinstance(value, str) else "" if value is None else f"{value:,}"


def _summary(match: ClientMatch) -> list[str]:
    said = [f"{len(match.pairs):,} of {match.num_requests:,} requests found by {match.by}"]
    notes = (
        (match.num_unlike, "have other lengths at the client than in the engine"),
        (match.num_unfit, "contradict the clocks of the others"),
    )
    said += [f"{number:,} {text}" for number, text in notes if number]
    if match.offset_ns is None:
        clock = "unknown: the client does not tell when requests began"
    elif not match.error_ns:
        clock = "client and engine read the same one"
    else:
        apart = "the wall clocks agree"
        if match.apart_ns:
            where = "behind" if match.offset_ns > 0 else "ahead of"
            apart = f"the client's is {abs(match.offset_ns) / 1e9:,.4f} s {where} the engine's"
        clock = f"{apart}, ± {match.error_ns / 1e6:.1f} ms"
    if match.apart_ns > NEAR_NS:
        clock += f"; are both of one run? By the wall clocks, {match.apart_ns / 1e9:,.1f} s apart"
    num_same = sum(each.has_same_chunks for each in match.pairs)
    gaps = f"ITL      of the {num_same:,} requests whose chunks match the engine's steps one by one"
    return [f"matched  {'; '.join(said)}", f"clocks   {clock}", *([gaps] if num_same else [])]
