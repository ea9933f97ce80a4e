"""Prints what the requests of a load generator waited for: before, in and after the engine."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.importing.client_match import ClientMatch, client_match
from stepscope.recordings.importing.client_split import (
    ITL_PARTS,
    TTFT_PARTS,
    ClientWait,
    at_ranks,
    itls,
    ttfts,
    worst,
)
from stepscope.recordings.importing.imported import client_result
from stepscope.recordings.importing.source import ForeignSession
from stepscope.recordings.state.session import request_name
from stepscope.tui.cli.shared.output import in_ms, note, say, text_table, write_json
from stepscope.tui.cli.shared.paths import find_recording

_RANKS = {"p50": 50, "p95": 95, "p99": 99, "worst": 100}
_NUM_WORST = 5


def open_client(file: str, recording: Recording) -> tuple[ForeignSession, ClientMatch]:
    """Read a result, and find its requests in a recording."""
    session = client_result(Path(file))
    note(session.note)
    return session, client_match(session, recording)


def print_split(file: str, client: str, as_json: bool) -> None:
    """Print how the client's TTFT and ITL divide, at some ranks and of the worst requests."""
    with Recording(find_recording(file)) as recording:
        note(recording.message)
        session, match = open_client(client, recording)
    kinds = {"TTFT": (ttfts(match), _names(match)), "ITL": (itls(match), ITL_PARTS)}
    if as_json:
        write_json(
            {
                "tool": session.info.engine,
                **{name: value for name, value in match._asdict().items() if name != "pairs"},
                "num_matched": len(match.pairs),
                **{kind.lower(): _document(*each) for kind, each in kinds.items()},
                "requests": [_wait_document(each, TTFT_PARTS) for each in kinds["TTFT"][0]],
            }
        )
        return
    say(f"{file} beside {client} ({session.info.engine})", *_summary(match))
    for kind, (waits, names) in kinds.items():
        say("", *(_table(kind, waits, names) if waits else [_NO_GAPS]))
    say("", "Each column but the mean is one request or gap, so that its parts add up.")
    for kind, (waits, names) in kinds.items():
        if waits:
            say("", *_worst(kind, waits, names))


_NO_GAPS = "ITL: unknown; the client does not tell when each token came, or its chunks differ"


def _names(match: ClientMatch) -> Sequence[str]:
    if match.offset_ns is None:
        return (*TTFT_PARTS[:3], "front end and delivery")
    return TTFT_PARTS


def _summary(match: ClientMatch) -> list[str]:
    said = [f"{len(match.pairs):,} of {match.num_requests:,} requests found by {match.by}"]
    if match.num_unlike:
        said.append(f"{match.num_unlike:,} have other lengths at the client than in the engine")
    if match.by == "request id":
        said += ["all their lengths agree"] * (not match.num_unlike)
    else:
        unsure = f"{match.num_unsure:,} might as well be another one of the same lengths"
        said.append(unsure if match.num_unsure else "for each there is only one")
    if match.num_unfit:
        said.append(f"{match.num_unfit:,} contradict the clocks of the others")
    if match.offset_ns is None:
        clock = "unknown: the client does not tell when requests began"
    elif not match.error_ns:
        clock = "client and engine read the same one"
    else:
        ahead = "behind" if match.offset_ns > 0 else "ahead of"
        clock = (
            f"the client's is {abs(match.offset_ns) / 1e9:,.4f} s {ahead} the engine's, "
            f"± {match.error_ns / 1e6:.1f} ms between front end and delivery"
        )
    if match.apart_ns:
        clock += f"; are both of one run? By the wall clocks, {match.apart_ns / 1e9:,.1f} s apart"
    num_same = sum(each.has_same_chunks for each in match.pairs)
    gaps = f"of the {num_same:,} requests whose chunks match the engine's steps one by one"
    return [f"matched  {'; '.join(said)}", f"clocks   {clock}", f"ITL      {gaps}"]


def _table(kind: str, waits: Sequence[ClientWait], names: Sequence[str]) -> list[str]:
    chosen = at_ranks(waits, list(_RANKS.values()))
    rows = [["client", _ms(fmean(each.ns for each in waits)), *(_ms(each.ns) for each in chosen)]]
    for place, name in enumerate(names):
        known = [ns for each in waits if (ns := each.parts_ns[place]) is not None]
        if known:
            mean = _ms(fmean(known))
            rows.append([f"  {name}", mean, *(_ms(each.parts_ns[place]) for each in chosen)])
    return text_table([f"{kind} ms", "mean", *_RANKS], rows)


def _worst(kind: str, waits: Sequence[ClientWait], names: Sequence[str]) -> list[str]:
    rows = [
        [
            request_name(each.pair.engine.request_id),
            f"{each.step:,}",
            _ms(each.ns),
            *map(_ms, each.parts_ns),
        ]
        for each in worst(waits, _NUM_WORST)
    ]
    return text_table([f"worst {kind}", "step", "client", *names], rows)


def _ms(ns: float | None) -> str:
    return "—" if ns is None else f"{ns / 1e6:,.1f}"


def _document(waits: Sequence[ClientWait], names: Sequence[str]) -> dict[str, Any]:
    chosen = zip(_RANKS, at_ranks(waits, list(_RANKS.values())), strict=False)
    return {
        "number": len(waits),
        **{rank: _wait_document(each, names) for rank, each in chosen},
        "worst_by_step": [_wait_document(each, names) for each in worst(waits, _NUM_WORST)],
    }


def _wait_document(each: ClientWait, names: Sequence[str]) -> dict[str, Any]:
    parts = zip(names, each.parts_ns, strict=True)
    return {
        "request_id": each.pair.engine.request_id,
        "client_id": each.pair.engine.client_id,
        "step": each.step,
        "client_ms": each.ns / 1e6,
        **{f"{name.replace(' ', '_')}_ms": in_ms(ns) for name, ns in parts},
    }
