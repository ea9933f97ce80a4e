"""`stepscope bench`: measures the throughput of an engine on this machine."""

import datetime
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import Knobs
from stepscope.tui.cli.shared.arguments import output_path
from stepscope.tui.cli.shared.options import command, option
from stepscope.tui.cli.shared.output import Progress, model_on_text, say
from stepscope.tui.cli.shared.process import engine_packages, prepare_process
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.views.format import three_digits

if TYPE_CHECKING:
    from stepscope.engine.bench.measured_run import Percentiles, ThroughputResult
    from stepscope.engine.protocol.wire import EngineInfo

_DRAWN = ": a range to draw from evenly, or one number"


@command(
    "stepscope bench",
    "stepscope bench --num-requests 256 -o out.json",
    "stepscope bench --model smollm2 --num-requests 32",
    sections=("serve", "knobs"),
)
def bench(
    num_requests: int | None = option(
        "INT", "number of requests  [default: 256, on a CPU 32]", min=1
    ),
    input_len: str = option("LOW:HIGH", "prompt length in tokens" + _DRAWN, default="100:1024"),
    output_len: str = option("LOW:HIGH", "output length in tokens" + _DRAWN, default="100:1024"),
    json_file: str | None = option(
        "FILE", "also write everything measured to this file (JSON)", "--output", "-o", "--json"
    ),
    *,
    flags: dict[str, Any],
) -> None:
    """Measure an engine on this machine.

    It runs requests through the engine of 'stepscope serve', in this process, as fast as it can:
    all are there at once, of random token ids, and no end token ends them. The defaults are a
    common yardstick: 256 requests, prompts and outputs of 100 to 1024 tokens, seed 0; on a CPU only
    the first 32 of them.
    """
    config = resolve(EngineConfig, "serve", flags)
    knobs = resolve(Knobs, "knobs", flags)
    lengths = (_lengths("--input-len", input_len), _lengths("--output-len", output_len))
    file = None if json_file is None else output_path(json_file)
    prepare_process()
    with engine_packages():
        from stepscope.engine.bench import throughput as engine

        spec = engine.ThroughputSpec(
            num_requests=num_requests,
            input_len=engine.LengthRange(*lengths[0]),
            output_len=engine.LengthRange(*lengths[1]),
            seed=config.seed,
        )
        with Progress() as progress:

            def ready(info: "EngineInfo", num: int) -> None:
                progress.close()
                num_prompt, num_output = engine.num_tokens(spec, num)
                tokens = f"{num_prompt:,} prompt and {num_output:,} output tokens"
                said = f"{model_on_text(info)}: {num:,} requests, {tokens}; Ctrl-C ends it"
                if num_requests is None and num < (most := engine.YARDSTICK_REQUESTS):
                    said += f"\nscaled down for a CPU: the first {num} of {most} requests; "
                    said += f"the full yardstick: --num-requests {most}"
                print(said, file=sys.stderr, flush=True)

            result, info = engine.run_throughput(
                config, knobs, spec, loading=progress, ready=ready, progress=progress
            )
    if file is not None:
        from stepscope.engine.execution.environment import num_threads

        document = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": engine.describe_machine(), "num_threads": num_threads(config),
            "engine": info, "config": config, "knobs": knobs, "work": spec, "result": result,
        }  # fmt: skip
        file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    say(*_table(result))
    if result.num_failed:
        message, _ = max(result.failures.items(), key=lambda item: item[1])
        raise CommandFailed(f"{result.num_failed} requests failed: {message}")
    if result.is_partial:
        raise Interrupted(
            f"interrupted with {result.num_finished} of {result.num_requests} requests finished: "
            "the figures cover what ran until then"
        )


def _table(result: "ThroughputResult") -> Iterator[str]:
    partial = "  (partial: interrupted)" if result.is_partial else ""
    made = f"({result.num_output_tokens:,} in {result.seconds:.1f} s){partial}"
    finished = f"({result.num_finished:,} of {result.num_requests:,} finished)"
    yield f"output     {three_digits(result.output_tokens_per_s)} tokens/s  {made}"
    yield f"total      {three_digits(result.total_tokens_per_s)} tokens/s  (prompts and outputs)"
    yield f"requests   {three_digits(result.requests_per_s)} requests/s  {finished}"
    if (steps := result.steps) is not None:
        use, shares = _percent(steps.budget_use), steps.shares
        yield f"steps      {steps.num_steps:,}; ms {_percentiles(steps.step_ms)}"
        yield (
            f"batch      {steps.mean_batch:.1f} requests on average, {use} of the token budget used"
        )
        yield (
            f"step time  scheduling {_percent(shares.schedule)}, laying out "
            f"{_percent(shares.prepare)}, model and sampling {_percent(shares.model)}, "
            f"update and publish {_percent(shares.finish)}"
        )
    yield f"TTFT       ms {_percentiles(result.ttft_ms)}"
    yield f"ITL        ms {_percentiles(result.itl_ms)}"
    hits = _percent(result.num_cached_tokens / (result.num_prompt_tokens or 1))
    yield (
        f"KV cache   {result.num_preemptions:,} preemptions, {result.num_cached_tokens:,} prompt "
        f"tokens ({hits}) from the prefix cache"
    )
    if result.steps is None:
        yield "telemetry off: no data about the steps"


def _lengths(option: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low):
        return int(low), int(high or low)
    raise WrongUsage(f"{option}: expected LOW:HIGH, as in 100:1024, or one length, got {text!r}")


def _percentiles(sample: "Percentiles | None") -> str:
    if sample is None:
        return "no samples"
    names = ("mean", "p50", "p90", "p99")
    return "  ".join(f"{name} {three_digits(getattr(sample, name))}" for name in names)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
