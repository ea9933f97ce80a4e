"""What `stepscope demo` runs: its engine, its workload, and what happens in its first minute."""

from collections.abc import Mapping

from msgspec import structs
from msgspec.structs import replace

from stepscope.engine.models.cache import smollm2
from stepscope.engine.protocol.commands import SetKnobs, SetWorkload, Submit
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue, StepCosts
from stepscope.engine.workload.arrivals import describe
from stepscope.recordings.file.service_levels import Levels
from stepscope.tui.session.tour.chapters import TimedAct
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import convert_flags

WHO = "stepscope demo"
STALL_S = 9.0  # when a long prompt is prefilled whole
_STALL_MS = 800.0  # how long it shall take
_LEAST_TOKENS, _MOST_TOKENS = 768, 3072
_WHOLE: dict[str, int | bool] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}
_AGAIN_S = 0.4  # the prompt is being prefilled by then, however slow the machine
# Requests under way from a second on. Two at a time: their prompts fit into three seconds.
_RAMP = {0.0: 2, 3.0: 4, 6.0: 6, 11.0: 8, 12.5: 10, 14.0: 12}


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
    text = " ".join(f"Line {n} of a long document." for n in range(num_tokens))
    prompt = Submit(
        client_id="the-long-prompt",
        prompt=text,
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


# A closed loop: when a request ends, the next one arrives. So steps have the same batches on any
# machine, only faster or slower. Prompts are 2.2 times as long as outputs, so every third step has
# a prefill chunk beside decodes. The cache is a little too small for 12 requests, so soon one of
# them is preempted, and waits (`tests/simulation/test_demo_mix.py`).
KNOBS = Knobs(max_num_batched_tokens=64, max_num_seqs=16)
KV_MEMORY = "60MB"
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
MAX_SPEED = 1000.0


def check_simulated(gpu: str | None, speed: float) -> None:
    """Raise WrongUsage if `--simulate` and `--speed` do not fit."""
    if gpu is None and speed != 1.0:
        raise WrongUsage("--speed goes with --simulate")
    if not 0 < speed <= MAX_SPEED:
        raise WrongUsage(f"--speed: expected a number above 0 and up to {MAX_SPEED:g}, got {speed}")


def workload_of(
    rate: str | None, model: str = "demo", *, is_simulated: bool = False
) -> WorkloadSpec:
    default = SPEAKING_WORKLOAD if model == smollm2.NAME else WORKLOAD
    default = SIMULATED_WORKLOAD if is_simulated else default
    if rate is None:
        return default
    return structs.replace(default, rate=convert_flags(WorkloadSpec, {"rate": rate})["rate"])


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
    memory = {"kv_memory": KV_MEMORY} if model == EngineConfig().model else {}
    return {**options, **KNOBS.as_dict(), **memory}, "serve"
