"""The throughput yardstick: a fixed set of requests through a real engine, as fast as possible.

`Machine` describes where it ran; versions are read without importing the packages.
"""

import contextlib
import platform
import random
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.engine.bench.measured_run import Progress, ThroughputResult, measure
from stepscope.engine.execution.environment import num_threads
from stepscope.engine.process.serve import open_engine, stop_signals
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError, Knobs
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import EngineInfo

YARDSTICK_REQUESTS = 256
CPU_REQUESTS = 32  # on a CPU, unless the spec sets a number
WARMUP_REQUESTS = 2  # not measured; the prefix cache is emptied after them
_LARGEST_TOKEN_ID = 10_000  # taken modulo the vocabulary


class LengthRange(NamedTuple):
    """A range of lengths, both ends included. Lengths are drawn from it uniformly."""

    low: int
    high: int


class ThroughputSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The requests to run. The defaults are those of nano-vLLM's `bench.py`, but greedy."""

    num_requests: int | None = None  # None: 256, or on a CPU the first 32 of these
    input_len: LengthRange = LengthRange(100, 1024)
    output_len: LengthRange = LengthRange(100, 1024)
    seed: int = 0


def check_lengths(spec: ThroughputSpec, max_model_len: int) -> None:
    """Raise ConfigError if a request of `spec` could be longer than `max_model_len`."""
    if spec.input_len.high + spec.output_len.high > max_model_len:
        raise ConfigError(
            "too_long",
            f"requests of up to {spec.input_len.high} + {spec.output_len.high} tokens do not fit "
            f"max_model_len={max_model_len}: lower --input-len or --output-len",
        )


def plan(spec: ThroughputSpec, num_requests: int, vocab_size: int) -> list[Submit]:
    """Return the requests of `spec`.

    Lengths are drawn in the same order as in nano-vLLM's `bench.py`. So seed 0 yields that
    benchmark's lengths with every vocabulary: 142,827 prompt and 133,966 output tokens for 256
    requests. If fewer requests are asked for, they are the first of these 256.
    """
    prompts, output_lens = _drawn(spec, num_requests)
    return [
        Submit(
            client_id=f"bench-{number}",
            prompt_token_ids=[token_id % vocab_size for token_id in prompts[number]],
            sampling=SamplingParams(max_tokens=output_lens[number], ignore_eos=True),
            with_text=False,
        )
        for number in range(num_requests)
    ]


def num_tokens(spec: ThroughputSpec, num_requests: int) -> tuple[int, int]:
    """Return the number of prompt tokens and of output tokens of all requests of `spec`."""
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
    loading: Callable[[str, float], None],
    ready: Callable[[EngineInfo, int], None],
    progress: Progress,
) -> tuple[ThroughputResult, EngineInfo]:
    """Start an engine, run the requests, and stop it. SIGINT ends it early with a partial result.

    Args:
        loading: called while the model loads, with the current task and its share done (0..1).
        ready: called before the first request, with the engine's info and the number of requests.

    Raises ConfigError: the engine cannot start, or the requests do not fit it.
    """
    with open_engine(config, knobs, progress=loading) as (core, intake):
        num_requests = spec.num_requests
        if num_requests is None:
            num_requests = CPU_REQUESTS if core.info.device == "cpu" else YARDSTICK_REQUESTS
        check_lengths(spec, core.scheduler.limits.max_model_len)
        # Different prompts from the measured ones, although the prefix cache is emptied anyway.
        other = msgspec.structs.replace(
            spec, seed=spec.seed + 1, output_len=LengthRange(1, min(16, spec.output_len.high))
        )
        warmup = plan(other, WARMUP_REQUESTS, intake.vocab_size)
        measured = plan(spec, num_requests, intake.vocab_size)
        ready(core.info, num_requests)
        with stop_signals(core):
            result, _ = measure(core, intake, measured, warmup, progress)
        return result, core.info


_PACKAGES = ("stepscope", "torch", "transformers", "safetensors", "numpy", "pyzmq", "msgspec")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The software versions and the processor of a measurement."""

    python: str
    system: str
    cpu: str
    num_cores: int  # that this process may use
    packages: dict[str, str]  # the installed ones


def describe_machine() -> Machine:
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        cpu = next(named, cpu)
    return Machine(
        python=platform.python_version(),
        system=platform.platform(),
        cpu=cpu,
        num_cores=num_threads(EngineConfig()),
        packages=packages,
    )
