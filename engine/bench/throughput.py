"""The throughput yardstick: a fixed set of requests through a real engine, as fast as it goes.

The engine is the one of `serve`, with its sockets and its loop.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from stepscope.engine.bench.measured_run import ThroughputProgress, ThroughputResult, measure
from stepscope.engine.client.telemetry_reader import TelemetryReader
from stepscope.engine.process.serve import open_engine, stop_signals
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import EngineInfo

YARDSTICK_REQUESTS = 256
CPU_REQUESTS = 32  # of the yardstick, unless so many are asked for
_LARGEST_TOKEN_ID = 10_000  # taken modulo the vocabulary


class LengthRange(NamedTuple):
    """Lengths are drawn evenly from it, both ends included."""

    low: int
    high: int


class ThroughputSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The work. The defaults are the yardstick of nano-vLLM's `bench.py` (but greedy)."""

    num_requests: int | None = None  # None: the yardstick's 256, on a CPU the first 32
    input_len: LengthRange = LengthRange(100, 1024)
    output_len: LengthRange = LengthRange(100, 1024)
    seed: int = 0
    temperature: float = 0.0
    num_warmup_requests: int = 2  # before the clock starts; the prefix cache is emptied after them


def check_lengths(spec: ThroughputSpec, max_model_len: int) -> None:
    """Raises ConfigError when a request of `spec` may be longer than the model takes."""
    if spec.input_len.high + spec.output_len.high > max_model_len:
        raise ConfigError(
            "too_long",
            f"requests of up to {spec.input_len.high} + {spec.output_len.high} tokens do not fit "
            f"max_model_len={max_model_len}: lower --input-len or --output-len",
        )


def plan(spec: ThroughputSpec, num_requests: int, vocab_size: int) -> list[Submit]:
    """The requests of `spec`.

    Drawn in the order of nano-vLLM's `bench.py`, so that seed 0 gives its lengths (142,827 prompt
    and 133,966 output tokens of 256 requests) for every vocabulary. Fewer requests are the first
    ones of the 256.
    """
    prompts, output_lens = _drawn(spec, num_requests)
    return [
        Submit(
            client_id=f"bench-{number}",
            prompt_token_ids=[token_id % vocab_size for token_id in prompts[number]],
            sampling=SamplingParams(
                max_tokens=output_lens[number],
                temperature=spec.temperature,
                seed=number if spec.temperature else None,
                ignore_eos=True,
            ),
            with_text=False,
        )
        for number in range(num_requests)
    ]


def num_tokens(spec: ThroughputSpec, num_requests: int) -> tuple[int, int]:
    """Prompt and output tokens of these requests."""
    prompts, output_lens = _drawn(spec, num_requests)
    return sum(len(each) for each in prompts), sum(output_lens)


def _drawn(spec: ThroughputSpec, num_requests: int) -> tuple[list[list[int]], list[int]]:
    source = random.Random(spec.seed)
    num_drawn = max(num_requests, YARDSTICK_REQUESTS)
    prompts = [
        [source.randint(0, _LARGEST_TOKEN_ID) for _ in range(source.randint(*spec.input_len))]
        for _ in range(num_drawn)
    ]
    output_lens = [source.randint(*spec.output_len) for _ in range(num_drawn)]
    return prompts[:num_requests], output_lens[:num_requests]


def run_throughput(
    config: EngineConfig,
    knobs: Knobs,
    spec: ThroughputSpec,
    *,
    loading: Callable[[str, float], None] = lambda what, share: None,
    ready: Callable[[EngineInfo, int], None] = lambda info, num_requests: None,
    progress: Callable[[ThroughputProgress], None] = lambda progress: None,
) -> tuple[ThroughputResult, EngineInfo]:
    """Start an engine, run the work, stop it. SIGINT ends it early with a partial result.

    Args:
        loading: gets what is being done and its share (0..1) while the model loads.
        ready: gets the engine and the number of requests before the first one.
        progress: called a few times a second.

    Raises:
        ConfigError: the engine cannot start, or the work does not fit it.
    """
    with open_engine(config, knobs, progress=loading) as (core, intake, vocab_size):
        num_requests = spec.num_requests
        if num_requests is None:
            num_requests = CPU_REQUESTS if core.info.device == "cpu" else YARDSTICK_REQUESTS
        check_lengths(spec, core.limits.max_model_len)
        # Other texts than the measured ones, though the prefix cache is emptied after them.
        other = msgspec.structs.replace(
            spec, seed=spec.seed + 1, output_len=LengthRange(1, min(16, spec.output_len.high))
        )
        warmup = plan(other, spec.num_warmup_requests, vocab_size)
        measured = plan(spec, num_requests, vocab_size)
        ready(core.info, num_requests)
        reader = TelemetryReader(core.info.telemetry_endpoint) if config.telemetry else None
        try:
            with stop_signals(core):
                measurement = measure(core, intake, measured, warmup, reader, progress)
        finally:
            if reader is not None:
                reader.close()
        return measurement.result, core.info
