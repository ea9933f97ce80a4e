"""`stepscope load`: sends a workload to an engine, and prints the figures that a client sees."""

import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.engine.client.client import EngineUnreachable
from stepscope.engine.protocol.commands import ResetPrefixCache
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.workload.arrivals import PromptWriter, describe, fit, from_trace, synthetic
from stepscope.engine.workload.load import LoadGenerator, LoadReport
from stepscope.engine.workload.traces import read_trace
from stepscope.recordings.figures import FIGURES, KINDS, RANKS, Figures, latency_name, value_text
from stepscope.recordings.session.sums import per
from stepscope.recordings.state.distribution import Distribution
from stepscope.recordings.state.latency import SLO, LatencyKind
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.levels import level_of_engine
from stepscope.tui.cli.shared.options import (
    AsJson,
    EngineName,
    command,
    flag,
    option,
    seconds_option,
)  # fmt: skip
from stepscope.tui.cli.shared.output import Progress, note, say, write_json
from stepscope.tui.cli.shared.process import StopSignals
from stepscope.tui.session.who import who
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import flag_of, resolve

_CHARS_PER_TOKEN = 4.0  # assumed if the engine does not report it
_KINDS: tuple[LatencyKind, ...] = ("ttft", "itl", "tpot", "e2e")
_WITH_TRACE = {"seed", "max_concurrency"}  # options of a synthetic mix that also apply to a trace


@command(
    "stepscope load --rate 2 --document-share 0.2 --seconds 60",
    "stepscope load engine-0 --trace trace.csv --time-scale 0.1 --limit 200",
    "stepscope load --num-requests 200 --reset-prefix-cache",
    takes_key=True,
    sections=("load",),
)
def load(
    endpoint: EngineName = None,
    trace: Path | None = option("FILE", "replay a trace: Azure CSV or Mooncake JSONL"),
    time_scale: float | None = option(
        "NUMBER", "multiply the trace's times: 0.1 is ten times as fast", min=0
    ),
    limit: int | None = option(
        "INT", "number of requests to take from the start of the trace", min=1
    ),
    seconds: float | None = seconds_option("send for this long, then wait for the rest"),
    reset_prefix_cache: bool = flag(
        "first empty the prefix cache, so that requests are the same work", "--reset-prefix-cache"
    ),
    as_json: AsJson = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Send work to an engine: a synthetic mix, or a real trace."""
    if trace is None and (time_scale is not None or limit is not None):
        name = "--limit" if time_scale is None else "--time-scale"
        raise WrongUsage(f"{name} belongs to --trace FILE")
    wrong = [flag_of(name) for name in flags if name not in _WITH_TRACE]
    if trace is not None and wrong:
        raise WrongUsage(f"{wrong[0]} describes a synthetic mix: leave it out with --trace")
    spec = resolve(WorkloadSpec, "load", flags)
    rows = read_trace(trace, limit) if trace is not None else None
    with connect(choose(endpoint, "stepscope load {}")) as client:
        info = client.info()
        slo = level_of_engine({}, info)
        tell = partial(note, begin="") if as_json else say
        if reset_prefix_cache:
            done = client.ask(ResetPrefixCache(who=who()))
            detail = done.detail if isinstance(done, Ack) else done
            tell(f"the prefix cache is reset: {detail}")
        writer = PromptWriter(info.chars_per_token or _CHARS_PER_TOKEN)
        longest = info.max_model_len
        if rows is None:
            arrivals, number = synthetic(spec, writer, longest), spec.num_requests
            tell(f"to {info.name}: {describe(spec)}; Ctrl-C ends it")
        else:
            arrivals = from_trace(rows, writer, longest, time_scale or 1.0, spec.seed)
            number = len(rows)
            fits = (fit(row.num_prompt_tokens, row.num_output_tokens, longest) for row in rows)
            num_cut = sum(is_cut for *_, is_cut in fits)
            cut = f"; {num_cut} are cut to max_model_len={longest}" if num_cut else ""
            tell(f"to {info.name}: {number} requests of a trace{cut}")
        interrupted = StopSignals(signal.SIGINT)
        with Progress() as progress:

            def on_progress(report: LoadReport) -> None:
                shares = []
                if number is not None:
                    shares.append((report.num_sent - report.num_open) / number)
                if seconds is not None:
                    shares.append(report.duration_s / seconds)
                share = min(1.0, max(shares)) if shares else None
                sent = f"{report.num_sent:,}" if number is None else f"{report.num_sent:,}/{number}"
                refused = f", {report.num_errors} refused" if report.num_errors else ""
                counts = f"{report.num_finished:,} finished, {report.num_open} under way{refused}"
                progress("sending", share, f"{sent} sent, {counts}")

            generator = LoadGenerator(
                client,
                arrivals,
                max_concurrency=spec.max_concurrency,
                seconds=seconds,
                on_progress=on_progress,
                wants_stop=lambda: bool(interrupted),
            )
            failure: EngineUnreachable | None = None
            with interrupted:
                try:
                    generator.run()
                except EngineUnreachable as error:
                    failure = error
                num_given_up = generator.report.num_open
                if interrupted:
                    generator.abort()
    report = generator.report
    figures = load_figures(report, slo)
    if as_json:
        write_json({
            "name": info.name, "slo": slo._asdict(), "figures": figures,
            "sent": report.num_sent, "aborted": report.num_aborted, "cut": report.num_cut,
            "unanswered": report.num_open, "refused": report.errors,
        })  # fmt: skip
    else:
        say(*_summary(report, info, figures))
    if failure is not None:
        raise failure
    if interrupted and (number is not None or seconds is not None):
        raise Interrupted(f"interrupted; {num_given_up} unfinished requests were aborted")
    if report.num_errors:
        raise CommandFailed(f"the engine refused {report.num_errors} requests")


def _summary(report: LoadReport, info: EngineInfo, figures: Figures) -> Iterator[str]:
    def text(name: str) -> str:
        return value_text(FIGURES[name], figures[name])

    counts = [f"{report.num_sent:,} sent", f"{report.num_finished:,} finished"]
    if report.num_aborted:
        counts.append(f"{report.num_aborted} aborted")
    if report.num_open:
        counts.append(f"{report.num_open} without an answer")
    yield f"requests  {', '.join(counts)} in {report.duration_s:.1f} s"
    for message, count in report.errors.most_common():
        yield f"refused   {count}: {message}"
    if report.num_cut:
        cut_to = f"max_model_len={info.max_model_len}"
        yield f"cut       {report.num_cut} of {report.num_sent} to {cut_to}"
    yield (
        f"tokens    in {report.num_prompt_tokens:,} ({text('in_tokens_per_s')})"
        f"  out {report.num_output_tokens:,} ({text('out_tokens_per_s')})"
    )
    yield f"cached    {text('prefix_hit_rate')} of the prompts came from the prefix cache"
    yield (
        f"goodput   {text('goodput')}: {text('goodput_per_s')} of {text('finished_per_s')} kept "
        "all their levels"
    )
    for kind in _KINDS:
        values = {name: figures[latency_name(kind, rank)] for rank, name in RANKS.items()}
        shown = "  ".join(f"{name} {ms:,.1f}" for name, ms in values.items() if ms is not None)
        said = f"{shown}  ms (as the client saw it)" if shown else "no samples"
        yield f"{KINDS[kind]:<9} {said}"


def load_figures(report: LoadReport, slo: SLO) -> dict[str, float | None]:
    """Return name -> value of the figures that a client can measure; None without samples."""
    finished = report.finished
    samples: dict[LatencyKind, tuple[Sequence[float], float | None]] = {
        "ttft": (report.ttft_s, slo.ttft_ms),
        "itl": (report.itl_s, slo.itl_ms),
        "tpot": ([each.tpot_s for each in finished if each.tpot_s is not None], None),
        "e2e": ([each.e2e_s for each in finished], None),
    }
    found: dict[str, float | None] = {}
    for kind, (samples_s, level_ms) in samples.items():
        counts = Distribution(None if level_ms is None else level_ms * 1e6)
        for each_s in samples_s:
            counts.add(round(each_s * 1e9))
        spread = counts.spread()
        for rank in RANKS:
            at_ns = spread.at_ns.get(rank)
            found[latency_name(kind, rank)] = None if at_ns is None else at_ns / 1e6
        if level_ms is not None:
            found[f"{kind}_within_slo"] = spread.within_slo
    ttft_s, itl_s, seconds = slo.ttft_ms / 1000, slo.itl_ms / 1000, report.duration_s
    num_kept = sum(each.ttft_s <= ttft_s and each.worst_itl_s <= itl_s for each in finished)
    return found | {
        "goodput": per(num_kept, len(finished)),
        "goodput_per_s": per(num_kept, seconds),
        "finished_per_s": per(report.num_finished, seconds),
        "finished": report.num_finished,
        "out_tokens_per_s": per(report.num_output_tokens, seconds),
        "in_tokens_per_s": per(report.num_prompt_tokens, seconds),
        "prefix_hit_rate": per(report.num_cached_tokens, report.num_finished_prompt_tokens),
        "seconds": seconds,
    }
