"""`stepscope demo` and `tour`: run engine and dashboard together, and leave nothing behind.

The demo has its own engine and workload, and acts in its first minute.
"""

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from stepscope.engine.models import smollm2
from stepscope.engine.protocol.commands import SetKnobs, SetWorkload, Submit
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobValue, StepCosts
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.workload.arrivals import describe, in_words
from stepscope.recordings.figures import FIGURES, value_text
from stepscope.recordings.file.service_levels import Levels
from stepscope.recordings.history.history import History
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.dashboards.browsers import WEB, browsers_of
from stepscope.tui.cli.dashboards.dashboard import need_terminal, new_history, run_live
from stepscope.tui.cli.shared.arguments import output_path
from stepscope.tui.cli.shared.engine_process import EngineProcess
from stepscope.tui.cli.shared.levels import own_levels
from stepscope.tui.cli.shared.options import argument, command, flag, option, seconds_option
from stepscope.tui.cli.shared.output import Progress, say
from stepscope.tui.cli.shared.process import (
    StopSignals,
    ending_on_signals,
    has_torch,
    missing_text,
    running,
)
from stepscope.tui.session.chapters import CHAPTERS, SMALL, Act, TimedAct
from stepscope.tui.session.tour import Director, Tour
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import convert_flags, resolve
from stepscope.tui.settings.settings import DashboardSettings
from stepscope.tui.views.format import file_size

HEADLESS_SECONDS = 20.0
_TICK_S = 0.2
WHO = "demo"
STALL_S = 9.0  # when a long prompt is prefilled whole
_STALL_MS = 800.0  # how long it shall take
_LEAST_TOKENS, _MOST_TOKENS = 768, 3072
_WHOLE: dict[str, int | bool] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}
_AGAIN_S = 0.4  # the prompt is being prefilled by then, however slow the machine
# Requests under way from a second on. Two at a time: their prompts fit into three seconds.
_RAMP = {0.0: 2, 3.0: 4, 6.0: 6, 11.0: 8, 12.5: 10, 14.0: 12}
# A closed loop: when a request ends, the next one arrives. So steps have the same batches on any
# machine, only faster or slower. Prompts are 2.2 times as long as outputs, so every third step has
# a prefill chunk beside decodes. The cache is a little too small for 12 requests, so soon one of
# them is preempted, and waits (`tests/simulation/test_demo_mix.py`). Its dtype is named, because
# 'auto' depends on the machine, and half as many bytes a token would be room for all.
KNOBS = Knobs(max_num_batched_tokens=64, max_num_seqs=16)
KV_CACHE: Mapping[str, KnobValue] = {"kv_memory": "30MB", "kv_cache_dtype": "bf16"}
WORKLOAD = WorkloadSpec(
    rate=100.0,
    document_share=0.7,
    chat_tokens=96,
    document_tokens=896,
    output_tokens=300,
    max_concurrency=12,
)
# About a third of the load that an H100 sustains with an 8B model, by its data sheet.
SIMULATED_WORKLOAD = WorkloadSpec(
    rate=10.0, document_share=0.15, chat_tokens=400, document_tokens=3072, output_tokens=220
)
# With a model that writes real text, eight streams decode in one step as fast as a person reads. A
# budget of 32 leaves 24 tokens for prompts beside them: a question is prefilled in two chunks, and
# no stream stalls for it. In fp32 the cache holds about 2,000 tokens.
SPEAKING_KNOBS = Knobs(max_num_batched_tokens=32, max_num_seqs=8)
SPEAKING_OPTIONS: Mapping[str, KnobValue] = {"kv_memory": "96MB", "max_model_len": 1024}
SPEAKING_WORKLOAD = WorkloadSpec(
    rate=WORKLOAD.rate,
    document_share=0.0,
    chat_tokens=45,  # a question in the chat template
    output_tokens=200,
    max_concurrency=SPEAKING_KNOBS.max_num_seqs,
    temperature=0.7,
    questions=True,
)
# On two quiet CPU cores, steps with a chunk beside 12 decodes keep these with room to spare.
SERVICE_LEVELS = {"slo_ttft_ms": 3000.0, "slo_itl_ms": 150.0}


@command(
    "stepscope demo",
    "stepscope demo --model smollm2",
    "stepscope demo --simulate h100 --model llama-3.1-8b --speed 10",
    "stepscope demo --headless --record out.mcap",
    "stepscope demo --web 8080",
    sections=("dashboard",),
    defaults=SERVICE_LEVELS,
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
        "GPU", "simulate a GPU (h100, ...) with --model, else with llama-3.1-8b", "--simulate"
    ),
    speed: float = option(
        "NUMBER", "with --simulate: 10 is ten times as fast", default=1.0, min=0.01, max=1000
    ),
    *,
    web: str | None = WEB,
    flags: dict[str, Any],
) -> None:
    """Start a real engine and watch it at work, or simulate one.

    The engine runs with a budget of 64 tokens, at most 16 running requests and, for the demo model,
    a 30 MB KV cache. At first 2 requests are under way, soon 12; one long prompt stalls them once.
    With --simulate it is another demo: 10 requests a second at a budget of 2,048 tokens,
    with levels of 500 ms (TTFT) and 50 ms (ITL).
    """
    if gpu is None and speed != 1.0:
        raise WrongUsage("--speed goes with --simulate")
    workload = workload_of(rate, model, is_simulated=gpu is not None)
    settings = resolve(DashboardSettings, "dashboard", flags, None if gpu else SERVICE_LEVELS)
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
    seconds, elapsed_s = seconds or HEADLESS_SECONDS, 0.0
    stop = StopSignals()
    options, runs = engine_arguments(model, with_tokens, gpu, speed, own_levels(settings))
    with (
        ending_on_signals(),
        Progress() as progress,
        ExitStack() as until_the_engine_ended,
        EngineProcess(options, progress, runs) as engine,
        ExitStack() as stack,
    ):
        about, costs = [f"workload   {workload_text(workload)}"], engine.info.step_costs
        if costs is not None:
            about.append(f"engine     {in_words(costs)}")
        if gpu is None and model == smollm2.NAME:
            progress.close()
            say(smollm2.NOTICE)
        source = Subscriber(engine.endpoint, history := new_history(settings))
        recorder = Recorder(source, record, dict(history.chosen)) if record else None
        if recorder is not None:
            stack.callback(recorder.stop)
        if headless:
            until_the_engine_ended.enter_context(stop)
        acts: list[Act] = [SetWorkload(workload=workload, who=WHO)]
        if workload == WORKLOAD and model == EngineConfig().model:
            acts = [*first_minute(workload, KNOBS, costs)]
        stack.enter_context(running(source))
        engine.wait_until_live(source, stop)
        director = stack.enter_context(
            # as long as nobody else has changed the engine
            Director(engine.endpoint, lambda: all(e.who == WHO for e in history.state.audit))
        )
        director.do(acts)
        if headless:
            for elapsed_s in stop.ticks(_TICK_S, seconds):
                engine.check()
                detail = f"{elapsed_s:.0f} s, {history.num_steps} steps"
                progress("running the demo", elapsed_s / seconds, detail)
        else:
            progress.close()
            say(*about)
            if browsers is not None:
                browsers.serve([engine.endpoint.control], flags)
            else:
                news = engine.news(director.news)
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
        if elapsed_s < seconds:
            raise Interrupted(f"interrupted after {elapsed_s:.0f} of {seconds:g} s")


def _summary(history: History) -> Iterator[str]:
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


def first_minute(workload: WorkloadSpec, knobs: Knobs, costs: StepCosts | None) -> list[TimedAct]:
    """Return the acts of the demo, in order of time; `costs` tell how long a stall may be."""
    num_tokens = _LEAST_TOKENS
    if costs is not None and costs.prefill_ms > 0:
        fitting = round(_STALL_MS / costs.prefill_ms * costs.num_prefill_tokens)
        num_tokens = max(_LEAST_TOKENS, min(_MOST_TOKENS, fitting))
    acts = [
        TimedAct(
            at_s, SetWorkload(workload=replace(workload, max_concurrency=num, seed=n), who=WHO)
        )
        for n, (at_s, num) in enumerate(_RAMP.items())
    ]
    prompt = Submit(
        client_id="the-long-prompt",
        prompt=" ".join(f"Line {n} of a long document." for n in range(num_tokens)),
        max_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=16, ignore_eos=True),
        stream=False,
        with_text=False,
    )
    before = {name: value for name, value in knobs.as_dict().items() if name in _WHOLE}
    reason = "a prompt prefilled whole, to show a stall"
    acts += [
        TimedAct(4.0, hint="each line is a request, each column a step; space stops the picture"),
        TimedAct(STALL_S, SetKnobs(changes={**_WHOLE}, reason=reason, who=WHO)),
        TimedAct(STALL_S, prompt),
        TimedAct(STALL_S + _AGAIN_S, SetKnobs(changes=before, reason="chunks again", who=WHO)),
        TimedAct(STALL_S + 2.0, hint="all stood still: w goes there, Enter says why, L comes back"),
        TimedAct(
            32.0, hint="B changes the token budget and shows what that does; ? lists all keys"
        ),
    ]
    return sorted(acts, key=lambda act: act.at_s)


def workload_of(
    rate: str | None, model: str = "demo", *, is_simulated: bool = False
) -> WorkloadSpec:
    usual = SPEAKING_WORKLOAD if model == smollm2.NAME else WORKLOAD
    flags = {} if rate is None else {"rate": rate}
    chosen = SIMULATED_WORKLOAD if is_simulated else usual
    return replace(chosen, **convert_flags(WorkloadSpec, flags))


def workload_text(workload: WorkloadSpec) -> str:
    """Return the workload in words. In a closed loop the next request comes when one ends."""
    text = describe(workload)
    if workload.max_concurrency is None or workload.rate < WORKLOAD.rate:
        return text
    return f"up to {workload.max_concurrency} requests under way at once: {text.partition(': ')[2]}"


def engine_arguments(
    model: str, with_tokens: bool, gpu: str | None, speed: float, levels: Levels
) -> tuple[Mapping[str, KnobValue], str]:
    """Return all options that matter, so that no config file changes them, and the command."""
    if gpu is not None:
        if with_tokens:
            raise WrongUsage("--with-tokens: a simulated engine has no text; leave it out")
        named = {} if model == EngineConfig().model else {"model": model}
        return {"gpu": gpu, "speed": speed, **levels, **named}, "simulated-engine"
    # `http` is empty: no HTTP server, even if the config file sets one for `serve`.
    options: dict[str, KnobValue] = {"model": model, "http": "", **levels}
    options["with_tokens"] = with_tokens
    if model == smollm2.NAME:
        # A model that speaks must show its text; nothing private is in it, the questions are ours.
        options |= {**SPEAKING_KNOBS.as_dict(), **SPEAKING_OPTIONS, "with_tokens": True}
        return options, "serve"
    cache = KV_CACHE if model == EngineConfig().model else {}
    return {**options, **KNOBS.as_dict(), **cache}, "serve"


# The tour

# Decodes beside chunks of 64 keep these levels; decodes beside a whole prompt of 900 do not.
_TOUR_LEVELS = {"slo_ttft_ms": 1000.0, "slo_itl_ms": 50.0}
TOUR_KV_CACHE: Mapping[str, KnobValue] = {"kv_memory": "32MB", "kv_cache_dtype": "bf16"}


@command("stepscope tour", "stepscope tour 4", sections=("dashboard",), defaults=_TOUR_LEVELS)
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
    options: Mapping[str, KnobValue] = {"model": "demo", "http": "", **TOUR_KV_CACHE}
    if simulate:  # step times of a sample that ran the demo model, and blocks as in 32 MB of it
        options = {"step_time": "chunked", "num_blocks": 682}
    knobs = {"max_num_batched_tokens": SMALL, "max_num_seqs": 16}
    options = {**options, **knobs, **own_levels(settings)}
    runs = "simulated-engine" if simulate else "serve"
    with (
        ending_on_signals(),
        Progress() as progress,
        EngineProcess(options, progress, runs, name="tour") as engine,
    ):
        source = Subscriber(engine.endpoint, new_history(settings))
        with running(source):
            engine.wait_until_live(source, StopSignals(signal.SIGINT))
            progress.close()
            with Director(engine.endpoint) as director:
                news = engine.news(director.news)
                lesson = Tour(director.do, director.ended, chapter - 1)
                run_live(source, settings, keeps_levels=False, news=news, tour=lesson)
