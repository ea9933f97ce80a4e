"""`stepscope explain`: prints why tokens of a recording were late, as a table or as JSON."""

from collections.abc import Mapping
from typing import Any

from stepscope.recordings.attribution.causes import WORDS, Late
from stepscope.recordings.attribution.explained import Bound, Explanation, explain_recording
from stepscope.recordings.attribution.front import shares_of
from stepscope.recordings.compare.file_run import FileRun
from stepscope.recordings.errors import TooLittleData
from stepscope.recordings.figures import KINDS, RANKS
from stepscope.recordings.session.regression import LEAST_S
from stepscope.recordings.state.distribution import LatencySpread
from stepscope.recordings.state.latency import LatencyKind
from stepscope.recordings.state.session import model_text, request_name
from stepscope.tui.cli.recordings.ledger import print_ledger
from stepscope.tui.cli.recordings.measured import LIVE_S, recorded
from stepscope.tui.cli.shared.arguments import request_number
from stepscope.tui.cli.shared.connect import is_recorded
from stepscope.tui.cli.shared.levels import (
    advice_lines,
    level_of,
    level_origins,
    limits_document,
    limits_text,
)
from stepscope.tui.cli.shared.options import AsJson, LastSeconds, Target, command, flag, option
from stepscope.tui.cli.shared.output import (
    clock_ms,
    in_ms,
    ms,
    note,
    plain,
    say,
    session_text,
    text_table,
    told,
    write_json,
)
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text

_BOTH_CLOCKS: tuple[LatencyKind, ...] = ("ttft", "served_ttft", "itl", "served_itl")


@command(
    "stepscope explain session.mcap --slo-itl 50ms",
    "stepscope explain freeze --json | jq '.late[] | {step, ms, cause}'",
    "stepscope explain engine-0 --seconds 10 --queue --json | jq .recompute_tax",
    "stepscope explain run.mcap --profile rank0.pt.trace.json.gz",
    sections=("levels",),
    takes_key=True,
)
def explain(
    target: Target = None,
    *,
    shows_queue: bool = flag(
        "instead: which requests wait for what, and which preemption cost how much", "--queue"
    ),
    seconds: LastSeconds = None,
    request: str | None = option("ID", "only this request, such as r12"),
    profile: str | None = option(
        "FILE", "instead: what ran in each step, by a trace of torch's profiler from vLLM"
    ),
    limit: int = option(
        "INT", "number of rows of each table, the longest waits first; 0 for all", default=20, min=0
    ),
    as_json: AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Say which tokens came late, and why; also who waits, or what ran."""
    is_file = is_recorded(target)
    if profile is not None and (flags or request is not None or shows_queue or not is_file):
        raise WrongUsage("--profile: of a recording; leave out --queue, --request and the levels")
    if shows_queue and (flags or request is not None):
        raise WrongUsage("--queue: leave out --slo-itl, --slo-ttft and --request")
    if seconds is not None and is_file and not shows_queue:
        raise WrongUsage("--seconds: of a recording only with --queue")
    wanted = None if request is None else request_number(request)
    last_s = seconds if is_file else seconds or LIVE_S
    usage = "stepscope explain {}" + " --queue" * shows_queue
    with recorded(target, seconds, flags, usage) as (file, recording):
        if profile is not None:
            from stepscope.tui.cli.recordings.other_tools import print_profile  # loads more

            print_profile(file, recording, profile, limit, as_json)
            return
        if shows_queue:
            print_ledger(file, recording, last_s, not is_file, limit, as_json)
            return
        if recording.info.totals_every_s is not None:
            raise CommandFailed(
                f"{file} holds no single steps: why a token was late is unknown; "
                f"'stepscope stats {file}' has its figures"
            )
        slo = level_of(flags, recording)
        origins = level_origins(flags, recording, is_file=is_file)
        found = explain_recording(recording, slo, wanted)
        note(recording.message)
        side = FileRun(recording, slo) if wanted is None and found.num_steps else None
    if not found.num_steps:
        raise TooLittleData(f"{file} holds no step, so nothing is known about late tokens")
    if as_json:
        limits = {} if side is None else limits_document(side)
        write_json({**_document(file, found), **limits})
        return
    span_s = None if side is None else side.figures()["seconds"]
    is_long = span_s is not None and span_s >= LEAST_S
    of = f"; {model_text(found.info)} on {found.info.name}"
    say(
        session_text(file, found.num_steps, span_s, last_s) + of,
        *_summary(found, origins),
        *([] if side is None else [f"limited by: {limits_text(side)}", *advice_lines(side)]),
        *_served(found),
        *_shares(found),
        *_graphs(found),
        *_tables(found, limit),
        *(["", f"'stepscope tune {file}' names the bottleneck"] if is_long and found.late else []),
    )


def _summary(found: Explanation, origins: Mapping[str, str]) -> list[str]:
    of = _of(found)
    lines = [_measured(f"gaps between tokens{of}", origins["slo_itl_ms"], found.itl)]
    if gaps := [each for each in found.late if each.token_idx > 0 and not each.is_excused]:
        longest = max(gaps, key=lambda each: each.gap_ns)
        streams = fmt.plural(sum(each.step == longest.step for each in gaps), "stream")
        steps = fmt.plural(len({each.step for each in gaps}), "step")
        lines.append(
            f"  in {steps}, the longest: {ms(longest.gap_ns)} at step {longest.step:,} "
            f"({clock_ms(found.info.wall_at(longest.end_ns))})"
            + (f", which held up {streams}" if found.request_id is None else "")
        )
    lines.append(_measured(f"first tokens{of}", origins["slo_ttft_ms"], found.ttft))
    number, num_late, num_first = found.affected  # a thousand late tokens may be of one request
    if num_late and found.request_id is None:
        first = f"; {num_first:,} only waited long for the first" if num_first else ""
        share = f"({num_late / number:.2%})"
        lines.append(f"requests with late tokens: {num_late:,} of {number:,} {share}{first}")
    number, longest_ms = found.never_served  # no latency includes those
    if longest_ms is not None:
        waited = f"the longest had waited {longest_ms:,.1f} ms"
        lines.append(f"no token at all: {fmt.plural(number, 'request')} by the end; {waited}")
    return lines


def _of(found: Explanation) -> str:
    return "" if found.request_id is None else f" of {request_name(found.request_id)}"


def _measured(what: str, origin: str, bound: Bound) -> str:
    if bound.median_ms is None:
        return f"{what}: none"
    share = bound.num_late / bound.num_waits
    return (
        f"{what}: {bound.num_late:,} of {bound.num_waits:,} ({share:.2%}) took longer than "
        f"{bound.bound_ms:,.1f} ms ({origin}); median {bound.median_ms:,.1f} ms"
    )


def _served(found: Explanation) -> list[str]:
    """Lines on the prompt of one request; of all, the engine's clock beside the front end's."""
    if (view := found.view) is not None:
        size = found.info.block_size
        prompt = late_text.misses_texts(view, size, lambda ns: clock_ms(found.info.wall_at(ns)))
        said = [f"{name} {ms(ns)}" for name, ns in shares_of(view).items()]
        if view.front is None or not said:
            return prompt
        api = f"API server {view.front.number}: {', '.join(said)}; ended: {view.finish_reason}"
        return [*prompt, api]
    if not (clocks := _clocks(found)):
        return []
    cells = []
    for name, spread in clocks.items():
        known = (spread.at_ns.get(rank) for rank in RANKS)
        shown = ("—" if ns is None else fmt.milliseconds(ns / 1e6) for ns in known)
        cells.append([name, f"{spread.num_samples:,}", *shown])
    return ["", *text_table(["ms", "number", *RANKS.values()], cells)]


def _clocks(found: Explanation) -> dict[str, LatencySpread]:
    """Latencies by the engine's clock and by the front end's; empty if no front end tells."""
    fronts = found.fronts.of()
    both = {KINDS[kind]: found.waits[kind] for kind in _BOTH_CLOCKS if fronts}
    return {name: waits.spread() for name, waits in (both | fronts).items()}


def _shares(found: Explanation) -> list[str]:
    if not found.shares:
        return []
    total = sum(share.ns for share in found.shares)
    rows = [
        [WORDS[cause].name, f"{num_late:,}", f"{ns / 1e6:,.0f} ms", f"{ns / total:.1%}"]
        for cause, num_late, ns in found.shares
    ]
    return ["", *text_table(["cause", "largest in", "time in late waits", "share"], rows)]


def _graphs(found: Explanation) -> list[str]:
    if all(each.kind == "none" for each in found.graphs) or found.request_id is not None:
        return []
    rows = [
        [
            each.kind,
            " to ".join(f"{n:,}" for n in dict.fromkeys((each.least_tokens, each.most_tokens))),
            f"{each.num_steps:,}",
            f"{each.share:.1%}",
            f"{each.median_ms:.3g} ms",
        ]
        for each in found.graphs
    ]
    return ["", *text_table(["CUDA graph", "tokens", "steps", "share", "step time p50"], rows)]


def _tables(found: Explanation, limit: int) -> list[str]:
    """Return a table of late gaps and one of late first tokens, the longest wait first.

    In one table, first tokens would hide the step that stalled all streams, when prompts queue.
    """
    if not found.late:
        came = " that came" if found.never_served.num_requests else ""
        return ["", f"no token{_of(found)}{came} was late"]
    gaps = [each for each in found.late if each.token_idx > 0]
    firsts = [each for each in found.late if each.token_idx == 0]
    of_gaps = _table(found, "late gaps between tokens (ITL)", gaps, limit) if gaps else []
    return of_gaps + (_table(found, "late first tokens (TTFT)", firsts, limit) if firsts else [])


def _table(found: Explanation, title: str, late: list[Late], limit: int) -> list[str]:
    alike: dict[tuple[int, int, str], list[Late]] = {}
    for each in late:
        alike.setdefault((-each.gap_ns, each.step, each.explanation), []).append(each)
    shown = [alike[key] for key in sorted(alike)[: limit or None]]
    rows = [
        [
            f"{group[0].step:,}",
            clock_ms(found.info.wall_at(group[0].end_ns)),
            f"{request_name(group[0].request_id)} #{group[0].token_idx + 1}"
            + (f" +{len(group) - 1}" if len(group) > 1 else ""),
            ms(group[0].gap_ns) + (" (paused)" if group[0].is_excused else ""),
            group[0].explanation,
        ]
        for group in shown
    ]
    rest = len(late) - sum(map(len, shown))
    more = [f"and {rest:,} more: --limit 0 shows all"] if rest else []
    heading = ["step", "at", "token (+ alike)", "took", "why, largest first"]
    return ["", f"{title}, the longest first", *text_table(heading, rows, "><<><"), *more]


def _document(file: str, found: Explanation) -> dict[str, Any]:
    view, prompt = found.view, None
    if view is not None and (misses := view.misses) is not None:
        wall_ns = None if misses.evicted_ns is None else found.info.wall_at(misses.evicted_ns)
        prompt = {
            "num_tokens": view.num_prompt_tokens,
            **late_text.parts_of(view, misses),
            **{name: getattr(misses, name) for name in misses.__struct_fields__[2:]},
            "evicted_wall_ns": wall_ns,
        }
    return {
        "recording": file,
        "engine": found.info.name,
        **told(found.info, "model", "simulated"),
        **told(found, "num_steps", "request_id", "itl", "ttft", "never_served", "graphs"),
        "served": {
            name: {RANKS[rank]: in_ms(ns) for rank, ns in spread.at_ns.items()}
            for name, spread in _clocks(found).items()
        },
        "prompt": prompt,
        "requests": plain(found.affected),
        "causes": plain(found.shares),
        "late": [
            {
                **told(each, "request_id", "client_id", "kind", "step", "cause"),
                "token": each.token_idx + 1,
                "wall_ns": found.info.wall_at(each.end_ns),
                "ms": in_ms(each.gap_ns),
                "only_paused": each.is_excused,
                "pieces": [{**told(piece), "text": piece.text} for piece in each.pieces],
            }
            for each in found.late
        ],
    }
