"""`stepscope load`: sends a workload to an engine and says what a client saw."""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.engine.client.errors import EngineUnreachable
from stepscope.engine.protocol.commands import Ack, ResetPrefixCache
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.workload.arrivals import (
    Arrival,
    PromptWriter,
    describe,
    fit,
    from_trace,
    synthetic,
)
from stepscope.engine.workload.corpus import Corpus
from stepscope.engine.workload.load import PATIENCE_S, LoadGenerator, LoadReport, percentile
from stepscope.engine.workload.traces import TraceRow, read_trace
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.signals import StopSignals
from stepscope.tui.session.control.who import call_me, who
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import resolve

_CHARS_PER_TOKEN = 4.0  # of an engine that does not say
_WITH_TRACE = {"seed", "max_concurrency"}  # the options of a mix that a trace has a use for


class LoadLimits(NamedTuple):
    """How much is sent, and how long an engine is waited for that answers nothing."""

    num_rows: int | None = None  # of the trace
    seconds: float | None = None
    patience_s: float = PATIENCE_S


def load(
    endpoint: str | None,
    trace: Path | None,
    time_scale: float | None,
    limits: LoadLimits,
    flags: Mapping[str, Any],
    reset_prefix_cache: bool = False,
    name: str | None = None,
) -> None:
    """Raises CommandFailed when requests went wrong, Interrupted when the run was cut short."""
    call_me(name)
    spec = resolve(WorkloadSpec, "load", flags)
    _check_usage(trace, time_scale, limits, flags)
    seconds = limits.seconds
    rows = read_trace(trace, limits.num_rows) if trace is not None else None
    with connect(choose(endpoint, "stepscope load {}")) as client:
        info = client.info()
        if reset_prefix_cache:
            done = client.ask(ResetPrefixCache(who=who()))
            say(f"the prefix cache is reset: {done.detail if isinstance(done, Ack) else done}")
        arrivals, num_arrivals = _arrivals(spec, rows, info, time_scale or 1.0)
        _announce(spec, rows, info)
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
    say(*_summary(generator.report, info))
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
    trace: Path | None,
    time_scale: float | None,
    limits: LoadLimits,
    flags: Mapping[str, Any],
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
    if seconds is not None and not 0 < seconds < float("inf"):
        raise WrongUsage(f"--seconds: expected a number above 0, got {seconds}")
    if not 0 <= limits.patience_s < float("inf"):
        raise WrongUsage(f"--patience: expected a number of at least 0, got {limits.patience_s}")


def _arrivals(
    spec: WorkloadSpec, rows: list[TraceRow] | None, info: EngineInfo, time_scale: float
) -> tuple[Iterator[Arrival], int | None]:
    """What to send, and how many there are (None: without an end)."""
    writer = PromptWriter(Corpus.english(), info.chars_per_token or _CHARS_PER_TOKEN)
    if rows is None:
        return synthetic(spec, writer, info.max_model_len), spec.num_requests
    return from_trace(rows, writer, info.max_model_len, time_scale, spec.seed), len(rows)


def _announce(spec: WorkloadSpec, rows: list[TraceRow] | None, info: EngineInfo) -> None:
    if rows is None:
        say(f"to {info.name}: {describe(spec)}; Ctrl-C ends it")
        return
    num_cut = sum(
        fit(row.num_prompt_tokens, row.num_output_tokens, info.max_model_len)[2] for row in rows
    )
    cut = f"; {num_cut} are cut to max_model_len={info.max_model_len}" if num_cut else ""
    say(f"to {info.name}: {len(rows)} requests of a trace{cut}")


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


def _summary(report: LoadReport, info: EngineInfo) -> Iterator[str]:
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
    per_s = 1 / report.duration_s if report.duration_s else 0.0
    yield (
        f"tokens    in {report.num_prompt_tokens:,} ({report.num_prompt_tokens * per_s:,.1f}/s)"
        f"  out {report.num_output_tokens:,} ({report.num_output_tokens * per_s:,.1f}/s)"
    )
    yield f"TTFT      {_percentiles(report.ttft_s)}"
    yield f"ITL       {_percentiles(report.itl_s)}"


def _percentiles(samples_s: list[float]) -> str:
    p50, p99 = percentile(samples_s, 0.5), percentile(samples_s, 0.99)
    if p50 is None or p99 is None:
        return "no samples"
    return f"p50 {p50 * 1000:,.1f} ms  p99 {p99 * 1000:,.1f} ms  (as the client saw it)"
