"""Prints a recording beside what another tool measured of the same run.

Of a load generator's result: what its requests waited for, before, in and after the engine
(`compare --client`). Of a trace of torch's profiler: what ran in each step (`explain --profile`).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.importing import torch_trace
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
from stepscope.tui.cli.shared.arguments import find_recording
from stepscope.tui.cli.shared.output import in_ms, ms, note, say, text_table, told, write_json

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
    tables = {of.kind: list(_wait_rows(of)) if of.waits else [] for of in found}
    if as_json:
        told = {**match._asdict(), "pairs": len(match.pairs)}
        all_ttfts = [_wait_row("", each, found[0]) for each in found[0].waits]
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


def _wait_rows(of: ClientWaits) -> Iterator[dict[str, Any]]:
    client = fmean(each.ns for each in of.waits) / 1e6
    means = [fmean(parts) / 1e6 for parts in zip(*(w.parts_ns for w in of.waits), strict=True)]
    parts = dict(zip(of.names, means, strict=True))
    yield {"rank": "mean", "client": client, **parts, "request": None, "step": None}
    for rank in _RANKS:
        yield _wait_row(f"p{rank}", of.at(rank), of)
    for number, each in enumerate(of.worst(_NUM_WORST)):
        yield _wait_row("" if number else "worst", each, of)


def _wait_row(rank: str, each: ClientWait, of: ClientWaits) -> dict[str, Any]:
    parts = {name: ns / 1e6 for name, ns in zip(of.names, each.parts_ns, strict=True)}
    of_engine = {"request": request_name(each.request_id), "step": each.step}
    return {"rank": rank, "client": each.ns / 1e6, **parts, **of_engine}


def _cell(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{round(value, 1) + 0.0:,.1f}"  # no -0.0
    return value if isinstance(value, str) else "" if value is None else f"{value:,}"


def _summary(match: ClientMatch) -> list[str]:
    said = [f"{len(match.pairs):,} of {match.num_requests:,} requests found by {match.by}"]
    if match.num_unlike:
        said.append(f"{match.num_unlike:,} have other lengths at the client than in the engine")
    if match.num_unfit:
        said.append(f"{match.num_unfit:,} contradict the clocks of the others")
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


# A profile

_KINDS_OF_STEPS: dict[str, Callable[[torch_trace.ProfiledStep], bool]] = {
    "all": lambda each: True,
    "decodes alone": lambda each: not each.batch[0],
    "with a prefill": lambda each: each.batch[0] > 0,
}
_NUM_KERNELS = 8
_NAME_WIDTH = 72


def print_profile(name: str, recording: Recording, file: str, limit: int, as_json: bool) -> None:
    """Print the time in kernels of each kind, and what is left to the host, by kind of step."""
    note("reading the trace")
    trace = torch_trace.read_trace(Path(file))
    steps, clock_ns = torch_trace.matched_steps(trace, recording)
    if as_json:
        write_json(_profile_document(trace, steps, clock_ns))
        return
    ran, idle = f"kernels on {trace.device}", "no kernel"
    if not trace.device:
        ran, idle = "operators on a CPU", "no operator"
    slowest = sorted(steps, key=lambda each: -each.ns)[: limit or None]
    shown = [("slowest" if not n else "", [each]) for n, each in enumerate(slowest)]
    groups = [(kind, list(filter(of, steps))) for kind, of in _KINDS_OF_STEPS.items()]
    cells = [_means(kind, those) for kind, those in [*groups, *shown] if those]
    heading = ["mean ms of a step", "steps", "step", "requests", *torch_trace.KERNEL_KINDS]
    total_ns, kernels = sum(trace.kernels.values()) or 1, []
    for (kind, kernel), ns in trace.kernels.most_common(_NUM_KERNELS):
        short = kernel if len(kernel) <= _NAME_WIDTH else f"{kernel[: _NAME_WIDTH - 1]}…"
        kernels.append([kind, f"{ns / 1e6:,.1f}", f"{ns / total_ns:.1%}", short])
    first, last = steps[0].step, steps[-1].step
    clock = "" if clock_ns is None else f"; wall clocks {ms(clock_ns)} apart"
    say(
        f"{name} beside {file}: {ran}, rank {trace.rank}",
        f"{len(steps):,} of {len(trace.steps):,} steps found by their batches: steps {first:,} to "
        f"{last:,}{clock}",
        "",
        *text_table([*heading, "host", "took"], cells),
        "",
        *text_table(["most time in", "ms", "of all", ""], kernels, "<>><"),
        "",
        f"host: {idle} ran of the step: scheduling, launching, waiting",
    )


def _means(kind: str, steps: Sequence[torch_trace.ProfiledStep]) -> list[str]:
    of_one = ["", ""]
    if len(steps) == 1:
        _, num_prefill, _, num_decode = steps[0].batch
        of_one = [f"{steps[0].step:,}", f"{num_prefill:,} prefill, {num_decode:,} decode"]
    times = [[*each.kernel_ns.values(), each.host_ns, each.ns] for each in steps]
    means = (fmean(column) for column in zip(*times, strict=True))
    return [kind, f"{len(steps):,}", *of_one, *(f"{ns / 1e6:,.2f}" for ns in means)]


def _profile_document(
    trace: torch_trace.TorchTrace, steps: Sequence[torch_trace.ProfiledStep], clock_ns: int | None
) -> dict[str, Any]:
    return {
        "device": trace.device or None,
        "rank": trace.rank,
        "num_profiled": len(trace.steps),
        "clock_ms": in_ms(clock_ns),
        "steps": [
            {
                **told(each, "step", "ns", "host_ns", "busy_ns"),
                **{f"{kind}_ms": in_ms(ns) for kind, ns in each.kernel_ns.items()},
            }
            for each in steps
        ],
        "kernels": [
            {"kind": kind, "name": name, "ms": in_ms(ns)}
            for (kind, name), ns in trace.kernels.most_common()
        ],
    }
