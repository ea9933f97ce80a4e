"""`stepscope load`: sends a workload to an engine, and prints the figures that a client sees."""

import math
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from stepscope.engine.client.errors import EngineUnreachable
from stepscope.engine.protocol.commands import ResetPrefixCache
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.workload.arrivals import (
    Arrival,
    PromptWriter,
    describe,
    fit,
    from_trace,
    synthetic,
)
from stepscope.engine.workload.corpus import Corpus
from stepscope.engine.workload.load import PATIENCE_S, LoadGenerator, LoadReport
from stepscope.engine.workload.traces import TraceRow, read_trace
from stepscope.recordings.figures.bounds import value_text
from stepscope.recordings.figures.sums import Figures
from stepscope.recordings.figures.table import FIGURES, KINDS, RANKS, latency_name
from stepscope.recordings.file.service_levels import levels_said, slo_of
from stepscope.recordings.session.sums import per
from stepscope.recordings.state.series.latency import SLO, LatencyKind
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.errors import say, write_json
from stepscope.tui.cli.shared.levels import chosen_levels, note_own
from stepscope.tui.cli.shared.options import (
    As,
    AsJson,
    EngineName,
    check_seconds,
    command,
    flag,
    option,
)
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.signals import StopSignals
from stepscope.tui.session.control.who import call_me, who
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import resolve

_CHARS_PER_TOKEN = 4.0  # assumed if the engine does not report it
_KINDS: tuple[LatencyKind, ...] = ("ttft", "itl", "tpot", "e2e")
_WITH_TRACE = {"seed", "max_concurrency"}  # options of a synthetic mix that also apply to a trace


class LoadLimits(NamedTuple):
    """How much to send, and how long to wait for an engine that does not answer."""

    num_rows: int | None = None  # rows of the trace; None: all
    seconds: float | None = None
    patience_s: float = PATIENCE_S


@command(
    "stepscope load --rate 2 --document-share 0.2 --seconds 60",
    "stepscope load engine-0 --trace trace.csv --time-scale 0.1 --limit 200",
    "stepscope load --num-requests 200 --reset-prefix-cache",
    takes_key=True,
    sections=("load",),
)
def load(
    endpoint: EngineName = None,
    trace: Annotated[
        Path | None, option("FILE", "replay a trace: Azure CSV or Mooncake JSONL")
    ] = None,
    time_scale: Annotated[
        float | None, option("NUMBER", "multiply the trace's times: 0.1 is ten times as fast")
    ] = None,
    limit: Annotated[
        int | None, option("INT", "number of requests to take from the start of the trace")
    ] = None,
    seconds: Annotated[
        float | None, option("NUMBER", "send for this long, then wait for the rest")
    ] = None,
    patience: Annotated[
        float,
        option(
            "NUMBER",
            "seconds to wait for an engine that does not answer (stopped or cut off); a "
            "killed engine ends the command at once",
        ),
    ] = 30.0,
    reset_prefix_cache: Annotated[
        bool,
        flag(
            "first empty the engine's prefix cache, so that the same requests are the same "
            "work again",
            "--reset-prefix-cache",
        ),
    ] = False,
    name: As = None,
    as_json: AsJson = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Send work to an engine: a synthetic mix, or a real trace."""
    limits = LoadLimits(limit, seconds, patience)
    call_me(name)
    announce = _on_stderr if as_json else say
    levels = chosen_levels({})
    spec = resolve(WorkloadSpec, "load", flags)
    _check_usage(trace, time_scale, limits, flags)
    seconds = limits.seconds
    rows = read_trace(trace, limits.num_rows) if trace is not None else None
    with connect(choose(endpoint, "stepscope load {}")) as client:
        info = client.info()
        note_own(levels, levels_said(info))
        slo = slo_of(levels, levels_said(info))
        if reset_prefix_cache:
            done = client.ask(ResetPrefixCache(who=who()))
            detail = done.detail if isinstance(done, Ack) else done
            announce(f"the prefix cache is reset: {detail}")
        arrivals, num_arrivals = _arrivals(spec, rows, info, time_scale or 1.0)
        announce(_announcement(spec, rows, info))
        interrupted = StopSignals(signal.SIGINT)
        with Progress() as progress:

            def on_progress(report: LoadReport) -> None:
                share = _share(report, num_arrivals, seconds)
                what = "waiting for the engine" if report.silent_s else "sending"
                progress(what, share, _so_far(report, num_arrivals, limits.patience_s))

            generator = LoadGenerator(
                client,
                arrivals,
                max_concurrency=spec.max_concurrency,
                seconds=seconds,
                on_progress=on_progress,
                wants_stop=lambda: bool(interrupted),
                patience_s=limits.patience_s,
            )
            with interrupted:
                failure = _run(generator)
                num_given_up = generator.report.num_open
                if interrupted:
                    generator.abort()
    figures = load_figures(generator.report, slo)
    if as_json:
        write_json(_document(generator.report, info, slo, figures))
    else:
        say(*_summary(generator.report, info, figures))
    if failure is not None:
        raise failure
    if interrupted and (num_arrivals is not None or seconds is not None):
        raise Interrupted(f"interrupted; {num_given_up} unfinished requests were aborted")
    if generator.report.num_errors:
        raise CommandFailed(f"the engine refused {generator.report.num_errors} requests")


def _run(generator: LoadGenerator) -> EngineUnreachable | None:
    try:
        generator.run()
    except EngineUnreachable as error:
        return error
    return None


def _check_usage(
    trace: Path | None, time_scale: float | None, limits: LoadLimits, flags: Mapping[str, Any]
) -> None:
    limit, seconds = limits.num_rows, limits.seconds
    if trace is None:
        for name, value in (("--time-scale", time_scale), ("--limit", limit)):
            if value is not None:
                raise WrongUsage(f"{name} belongs to --trace FILE")
    else:
        for name in flags:
            if name not in _WITH_TRACE:
                option = "--" + name.replace("_", "-")
                raise WrongUsage(f"{option} describes a synthetic mix: leave it out with --trace")
    if time_scale is not None and not 0 <= time_scale < float("inf"):
        raise WrongUsage(f"--time-scale: expected a number of at least 0, got {time_scale}")
    if limit is not None and limit < 1:
        raise WrongUsage(f"--limit: expected a whole number of at least 1, got {limit}")
    check_seconds(seconds)
    if not 0 <= limits.patience_s < float("inf"):
        raise WrongUsage(f"--patience: expected a number of at least 0, got {limits.patience_s}")


def _arrivals(
    spec: WorkloadSpec, rows: list[TraceRow] | None, info: EngineInfo, time_scale: float
) -> tuple[Iterator[Arrival], int | None]:
    """Return the requests to send, and their number (None: without end)."""
    writer = PromptWriter(Corpus.english(), info.chars_per_token or _CHARS_PER_TOKEN)
    if rows is None:
        return synthetic(spec, writer, info.max_model_len), spec.num_requests
    return from_trace(rows, writer, info.max_model_len, time_scale, spec.seed), len(rows)


def _on_stderr(line: str) -> None:
    print(f"stepscope: {line}", file=sys.stderr)


def _announcement(spec: WorkloadSpec, rows: list[TraceRow] | None, info: EngineInfo) -> str:
    if rows is None:
        return f"to {info.name}: {describe(spec)}; Ctrl-C ends it"
    num_cut = sum(
        fit(row.num_prompt_tokens, row.num_output_tokens, info.max_model_len)[2] for row in rows
    )
    cut = f"; {num_cut} are cut to max_model_len={info.max_model_len}" if num_cut else ""
    return f"to {info.name}: {len(rows)} requests of a trace{cut}"


def _share(report: LoadReport, num_arrivals: int | None, seconds: float | None) -> float | None:
    shares = []
    if num_arrivals is not None:
        shares.append((report.num_sent - report.num_open) / num_arrivals)
    if seconds is not None:
        shares.append(report.duration_s / seconds)
    return min(1.0, max(shares)) if shares else None


def _so_far(report: LoadReport, num_arrivals: int | None, patience_s: float) -> str:
    sent = f"{report.num_sent:,}" if num_arrivals is None else f"{report.num_sent:,}/{num_arrivals}"
    refused = f", {report.num_errors} refused" if report.num_errors else ""
    silent = ""
    if report.silent_s:
        silent = f", no answer from it for {report.silent_s:.0f} s of {patience_s:g}"
    counts = f"{sent} sent, {report.num_finished:,} finished, {report.num_open} under way"
    return f"{counts}{refused}{silent}"


def _document(
    report: LoadReport, info: EngineInfo, slo: SLO, figures: Figures
) -> dict[str, object]:
    return {
        "name": info.name,
        "slo": slo._asdict(),
        "figures": dict(figures),
        "sent": report.num_sent,
        "aborted": report.num_aborted,
        "cut": report.num_cut,
        "unanswered": report.num_open,
        "refused": dict(report.errors),
    }


def _summary(report: LoadReport, info: EngineInfo, figures: Figures) -> Iterator[str]:
    counts = [f"{report.num_sent:,} sent", f"{report.num_finished:,} finished"]
    if report.num_aborted:
        counts.append(f"{report.num_aborted} aborted")
    if report.num_open:
        counts.append(f"{report.num_open} without an answer")
    yield f"requests  {', '.join(counts)} in {report.duration_s:.1f} s"
    for message, count in report.errors.most_common():
        yield f"refused   {count}: {message}"
    if report.num_cut:
        yield (
            f"cut       {report.num_cut} of {report.num_sent} to max_model_len={info.max_model_len}"
        )
    yield (
        f"tokens    in {report.num_prompt_tokens:,} ({_text(figures, 'in_tokens_per_s')})"
        f"  out {report.num_output_tokens:,} ({_text(figures, 'out_tokens_per_s')})"
    )
    yield f"cached    {_text(figures, 'prefix_hit_rate')} of the prompts came from the prefix cache"
    yield (
        f"goodput   {_text(figures, 'goodput')}: {_text(figures, 'goodput_per_s')} of "
        f"{_text(figures, 'finished_per_s')} kept all their levels"
    )
    for kind in _KINDS:
        values = [figures[latency_name(kind, rank)] for rank in RANKS]
        if values[0] is None:
            yield f"{KINDS[kind]:<9} no samples"
            continue
        shown = "  ".join(
            f"{name} {value:,.1f}" for name, value in zip(RANKS.values(), values, strict=True)
        )
        yield f"{KINDS[kind]:<9} {shown}  ms (as the client saw it)"


def _text(figures: Figures, name: str) -> str:
    return value_text(FIGURES[name], figures[name])


def load_figures(report: LoadReport, slo: SLO) -> dict[str, float | None]:
    """Return name -> value of the figures that a client can measure; None without samples."""
    finished = report.finished
    samples: dict[LatencyKind, Sequence[float]] = {
        "ttft": report.ttft_s,
        "itl": report.itl_s,
        "tpot": [each.tpot_s for each in finished if each.tpot_s is not None],
        "e2e": [each.e2e_s for each in finished],
    }
    found: dict[str, float | None] = {}
    for kind, samples_s in samples.items():
        ordered = sorted(samples_s)
        for rank in RANKS:
            value_s = _nearest_rank(ordered, rank)
            found[latency_name(kind, rank)] = None if value_s is None else value_s * 1000
    ttft_s, itl_s, seconds = slo.ttft_ms / 1000, slo.itl_ms / 1000, report.duration_s
    num_kept = sum(each.ttft_s <= ttft_s and each.worst_itl_s <= itl_s for each in finished)
    return found | {
        "ttft_within_slo": _share_within(report.ttft_s, ttft_s),
        "itl_within_slo": _share_within(report.itl_s, itl_s),
        "goodput": per(num_kept, len(finished)),
        "goodput_per_s": per(num_kept, seconds),
        "finished_per_s": per(report.num_finished, seconds),
        "finished": report.num_finished,
        "out_tokens_per_s": per(report.num_output_tokens, seconds),
        "in_tokens_per_s": per(report.num_prompt_tokens, seconds),
        "prefix_hit_rate": per(report.num_cached_tokens, report.num_finished_prompt_tokens),
        "seconds": seconds,
    }


def _nearest_rank(ordered: Sequence[float], rank: int) -> float | None:
    if not ordered:
        return None
    return ordered[max(0, math.ceil(rank * len(ordered) / 100) - 1)]


def _share_within(samples_s: Sequence[float], level_s: float) -> float | None:
    return per(sum(each <= level_s for each in samples_s), len(samples_s))
