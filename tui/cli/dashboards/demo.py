"""`stepscope demo` and `tour`: run engine and dashboard together, and leave nothing behind."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.engine.models.cache import smollm2
from stepscope.engine.protocol.commands import SetWorkload
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.workload.arrivals import in_words
from stepscope.recordings.figures.table import FIGURES, value_text
from stepscope.recordings.history.history import History
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.dashboards import demo_engine
from stepscope.tui.cli.dashboards.browsers import WEB, browsers_of
from stepscope.tui.cli.dashboards.dashboard import need_terminal, new_history, run_live
from stepscope.tui.cli.shared.engine_process import EngineProcess
from stepscope.tui.cli.shared.levels import own_levels
from stepscope.tui.cli.shared.options import argument, command, flag, option, seconds_option
from stepscope.tui.cli.shared.output import Progress, say
from stepscope.tui.cli.shared.paths import output_path
from stepscope.tui.cli.shared.process import StopSignals, ending_on_signals, has_torch, missing_text
from stepscope.tui.session.tour.chapters import CHAPTERS, SMALL, Act
from stepscope.tui.session.tour.tour import Director, Tour
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings
from stepscope.tui.views.format import file_size

HEADLESS_SECONDS = 20.0
_JOIN_S = 10.0
_TICK_S = 0.2


@command(
    "stepscope demo",
    "stepscope demo --model smollm2",
    "stepscope demo --rate 0.5",
    "stepscope demo --simulate h100 --model llama-3.1-8b --speed 10",
    "stepscope demo --headless --record out.mcap",
    "stepscope demo --web 8080",
    sections=("dashboard",),
    defaults=demo_engine.SERVICE_LEVELS,
)
def demo(
    model: str = option("TEXT", "the model, as in 'stepscope serve'", default="demo"),
    rate: str | None = option(
        "NUMBER", "requests a second at most (default: the next comes when one ends)"
    ),
    headless: bool = flag("run without a terminal and print a summary at the end", "--headless"),
    seconds: float | None = seconds_option("with --headless: how long to run (default: 20)"),
    record: Path | None = option("FILE", "record the session (MCAP)"),
    with_tokens: bool = flag("show and record prompts and outputs too", "--with-tokens"),
    gpu: str | None = option(
        "GPU",
        "simulate a GPU (h100, a100, ...) with --model on it, llama-3.1-8b if not given",
        "--simulate",
    ),
    speed: float = option("NUMBER", "with --simulate: 10 is ten times as fast", default=1.0),
    *,
    web: str | None = WEB,
    flags: dict[str, Any],
) -> None:
    """Start a real engine and watch it at work, or simulate one.

    The engine runs with a budget of 64 tokens, at most 16 running requests and, for the demo model,
    a 60 MB KV cache. At first 2 requests are under way, soon 12, or fewer with --rate; one long
    prompt stalls them once. With --simulate it is another demo: 10 requests a second at a budget of
    2,048 tokens, with service levels of 500 ms (TTFT) and 50 ms (ITL).
    """
    demo_engine.check_simulated(gpu, speed)
    workload = demo_engine.workload_of(rate, model, is_simulated=gpu is not None)
    settings = resolve(
        DashboardSettings, "dashboard", flags, None if gpu else demo_engine.SERVICE_LEVELS
    )
    browsers = browsers_of(web)
    if browsers is not None and headless:
        raise WrongUsage("--web: the demo is --headless already where browsers show it")
    if not headless and browsers is None:
        need_terminal("add --headless, or --web PORT")
    if not headless and seconds is not None:
        raise WrongUsage("--seconds goes with --headless")
    if gpu is None and not has_torch():
        raise CommandFailed(f"{missing_text('torch')}; without it: stepscope demo --simulate h100")
    if record is not None:
        output_path(str(record), "--record", is_new=True)
    cut_short: str | None = None
    stop = StopSignals()
    with ending_on_signals(), Progress() as progress, ExitStack() as until_the_engine_ended:
        levels = own_levels(settings)
        options, runs = demo_engine.engine_arguments(model, with_tokens, gpu, speed, levels)
        with EngineProcess(options, progress, runs) as engine, ExitStack() as stack:
            costs = engine.info.step_costs
            about = [f"workload   {demo_engine.workload_text(workload)}"]
            about += [f"engine     {in_words(costs)}"] if costs is not None else []
            if gpu is None and model == smollm2.NAME:
                progress.close()
                say(smollm2.NOTICE)
            source = Subscriber(engine.endpoint, history := new_history(settings))
            recorder = Recorder(source, record, dict(history.chosen)) if record else None
            if recorder is not None:
                stack.callback(recorder.stop)
            if headless:
                until_the_engine_ended.enter_context(stop)
            acts: list[Act] = [SetWorkload(workload=workload, who=demo_engine.WHO)]
            if workload == demo_engine.WORKLOAD and model == EngineConfig().model:
                acts = [*demo_engine.first_minute(workload, demo_engine.KNOBS, costs)]
            stack.callback(source.stop)
            source.start()
            wait_until_live(engine, source, stop)
            director = stack.enter_context(Director(engine.endpoint, partial(_is_alone, history)))
            director.do(acts)
            if headless:
                seconds = seconds or HEADLESS_SECONDS
                cut_short = _wait(engine, source, seconds, progress, stop)
            else:
                progress.close()
                say(*about)
                if browsers is not None:
                    browsers.serve([engine.endpoint.control], flags)
                else:
                    news = news_of(engine, director.news)
                    run_live(source, settings, recorder, keeps_levels=False, news=news)
    if recorder is not None and recorder.state == "failed":
        raise CommandFailed(recorder.error or f"{record} could not be written")
    if stop and history.num_steps == 0:
        raise Interrupted("interrupted before the engine ran a step")
    if headless:
        say(*about, *_summary(history))
        if recorder is not None:
            written = f"{recorder.num_steps:,} steps, {file_size(recorder.num_bytes)}"
            say(f"recording  {recorder.path} ({written})")
        if history.num_steps == 0:
            raise CommandFailed("no step came from the engine")
        if history.gaps or history.num_lost:
            lost = f"{history.num_lost} messages of the engine were lost"
            raise CommandFailed(f"{len(history.gaps)} gaps: {lost}")
    if cut_short is not None:
        raise Interrupted(cut_short)


def wait_until_live(engine: EngineProcess, source: Subscriber, stop: StopSignals) -> None:
    """Wait until the source receives telemetry. A signal ends the wait.

    The workload starts afterwards, so that its first request is seen.
    """
    deadline_s = time.monotonic() + _JOIN_S
    while source.status != "live":
        engine.check()
        if time.monotonic() > deadline_s:
            raise CommandFailed(f"no telemetry from the engine: {source.error}")
        if stop.wait(0.02):
            return


def news_of(engine: EngineProcess, more: Callable[[], str | None]) -> Callable[[], str | None]:
    """Return what is called in every frame: it tells, once, that the engine has ended; and more."""
    notice = iter(["the engine has ended for good"])

    def news() -> str | None:
        return (None if engine.exit_code is None else next(notice, None)) or more()

    return news


def _is_alone(history: History) -> bool:
    """Whether nobody else has changed the engine."""
    return all(entry.who == demo_engine.WHO for entry in history.state.audit)


def _wait(
    engine: EngineProcess, source: Subscriber, seconds: float, progress: Progress, stop: StopSignals
) -> str | None:
    """Wait until `seconds` have passed or a signal arrives; return a notice about the signal."""
    elapsed_s = 0.0
    for elapsed_s in stop.ticks(_TICK_S, seconds):
        engine.check()
        num_steps = source.history.num_steps
        progress("running the demo", elapsed_s / seconds, f"{elapsed_s:.0f} s, {num_steps} steps")
    return None if elapsed_s >= seconds else f"interrupted after {elapsed_s:.0f} of {seconds:g} s"


def _summary(history: History) -> Iterator[str]:
    """Yield lines with the figures of a session: steps, tokens, latencies and so on."""
    found = history.windows.figures(None, None)

    def text(name: str) -> str:
        return value_text(FIGURES[name], found[name])

    seconds = f"{found['seconds'] or 0:.1f} s"
    yield f"steps      {found['steps'] or 0:,.0f} in {seconds} ({text('steps_per_s')})"
    yield f"tokens     out {text('out_tokens_per_s')}, in {text('in_tokens_per_s')}"
    for kind in ("ttft", "itl"):
        yield f"{kind.upper():<10} p50 {text(f'{kind}_p50')}  p99 {text(f'{kind}_p99')}"
    yield f"mixed      {text('mixed_steps')} of the steps held prefill and decode"
    yield f"gaps       {len(history.gaps)}"


# The tour

# Decodes beside chunks of 64 keep these levels; decodes beside a whole prompt of 900 do not.
_TOUR_LEVELS = {"slo_ttft_ms": 1000.0, "slo_itl_ms": 50.0}
_TOUR_KNOBS: Mapping[str, KnobValue] = {"max_num_batched_tokens": SMALL, "max_num_seqs": 16}
_TOUR_ENGINE: Mapping[str, KnobValue] = {
    "model": "demo",
    "http": "",
    "kv_memory": "64MB",
    **_TOUR_KNOBS,
}
# The same engine simulated: the step times of a sample that ran the demo model, and as many blocks
# as 64 MB hold of that model.
_TOUR_SIMULATED: Mapping[str, KnobValue] = {
    "step_time": "chunked",
    "num_blocks": 682,
    **_TOUR_KNOBS,
}


@command(
    "stepscope tour",
    "stepscope tour 4",
    "stepscope tour --simulate",
    sections=("dashboard",),
    defaults=_TOUR_LEVELS,
)
def tour(
    chapter: int = argument(
        "CHAPTER",
        "a step, the batch, the budget, a freeze, chunks, the knee, KV blocks, prefix "
        "hits, preemption, a late token: 1 to 10",
        default=1,
        min=1,
        max=len(CHAPTERS),
    ),
    *,
    simulate: bool | None = flag(
        "simulate the engine instead of running one (default: only where torch is missing)",
        "--simulate/--no-simulate",
        default=None,
    ),
    flags: dict[str, Any],
) -> None:
    """Learn how serving works, on a live engine."""
    settings = resolve(DashboardSettings, "dashboard", flags, _TOUR_LEVELS)
    need_terminal("the tour runs only in a terminal")
    if simulate is None:
        simulate = not has_torch()
    options, runs = (_TOUR_SIMULATED, "simulated-engine") if simulate else (_TOUR_ENGINE, "serve")
    with ending_on_signals(), Progress() as progress:
        options = {**options, **own_levels(settings)}
        with EngineProcess(options, progress, runs, name="tour") as engine:
            source = Subscriber(engine.endpoint, new_history(settings))
            source.start()
            try:
                wait_until_live(engine, source, StopSignals(signal.SIGINT))
                progress.close()
                with Director(engine.endpoint) as director:
                    news = news_of(engine, director.news)
                    lesson = Tour(director.do, director.ended, chapter - 1)
                    run_live(source, settings, keeps_levels=False, news=news, tour=lesson)
            finally:
                source.stop()
