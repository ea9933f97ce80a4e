"""The throughput bench: the same requests everywhere, and every token counted exactly once."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine.bench.measured_run import Percentiles, measure
from stepscope.engine.bench.throughput import (
    LengthRange,
    ThroughputSpec,
    check_lengths,
    num_tokens,
    plan,
)
from stepscope.engine.control.intake import Intake
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.protocol.commands import Shutdown, Submit
from stepscope.engine.protocol.knobs import ConfigError, Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import VOCAB_SIZE, SimulatedRunner
from stepscope.engine.telemetry.publisher import Publisher
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import simulated_info


def engine(
    *,
    num_blocks: int = 4096,
    runner: SimulatedRunner | None = None,
    telemetry: bool = True,
    max_waiting: int = 100_000,
    **knobs: int,
) -> tuple[EngineCore, Intake]:
    limits = Limits(max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=2048)
    core = EngineCore(
        simulated_info(limits, num_blocks, 16, seed=0),
        runner or SimulatedRunner(CostModel()),
        Scheduler(KVCacheManager(num_blocks, 16), Knobs(**knobs), limits),
        Publisher(None, 64) if telemetry else None,
        max_waiting=max_waiting,
    )
    return core, Intake(None, VOCAB_SIZE, limits.max_model_len)


def some(num_requests: int, *, seed: int = 0, longest: int = 100) -> list[Submit]:
    lengths = LengthRange(10, longest)
    spec = ThroughputSpec(input_len=lengths, output_len=lengths, seed=seed)
    return plan(spec, num_requests, VOCAB_SIZE)


def test_the_throughput_workload_equals_that_of_nano_vllm() -> None:
    # nano-vLLM's README gives 133,966 output tokens for its 256 requests.
    assert num_tokens(ThroughputSpec(), 256) == (142_827, 133_966)
    submits = plan(ThroughputSpec(), 256, vocab_size=20_000)
    assert submits[0].prompt_token_ids[:4] == [6311, 6890, 663, 4242]
    assert [each.sampling.max_tokens for each in submits[:4]] == [845, 312, 607, 843]
    assert all(each.sampling.ignore_eos for each in submits)


def test_what_does_not_fit_the_model_is_refused_before_the_run() -> None:
    check_lengths(ThroughputSpec(), 2048)
    with pytest.raises(ConfigError, match=r"1024 \+ 1024 tokens do not fit max_model_len=2047"):
        check_lengths(ThroughputSpec(), 2047)
    submit = Submit(prompt_token_ids=[1] * 2000, sampling=SamplingParams(max_tokens=100))
    with pytest.raises(ConfigError, match="max_model_len"):
        measure(*engine(), [submit])


def test_a_workload_of_fewer_requests_or_a_smaller_vocabulary_keeps_its_lengths() -> None:
    spec = ThroughputSpec()
    full, some_of_them = plan(spec, 256, 20_000), plan(spec, 32, 260)
    for one, other in zip(full, some_of_them, strict=False):
        assert len(one.prompt_token_ids) == len(other.prompt_token_ids)
        assert max(other.prompt_token_ids) < 260
        assert one.sampling == other.sampling


def test_every_request_generates_exactly_the_tokens_asked_for() -> None:
    submits = some(20)
    result, requests = measure(*engine(), submits)
    asked = [each.sampling.max_tokens for each in submits]
    assert [each.num_output_tokens for each in requests] == asked
    assert (result.num_finished, result.num_failed, result.is_partial) == (20, 0, False)
    assert result.num_output_tokens == sum(asked)
    assert result.num_prompt_tokens == sum(len(each.prompt_token_ids or ()) for each in submits)


def test_bench_rates_and_latencies_follow_the_engines_clock() -> None:
    # One request: prompt in one step of 8 ms, then 9 more; 0.2 ms pass before each is launched.
    runner = SimulatedRunner(CostModel(floor_ms=8.0, token_us=0.0, context_ns=0.0))
    submit = Submit(prompt_token_ids=[1] * 32, sampling=SamplingParams(max_tokens=10))
    result, _ = measure(*engine(runner=runner), [submit])
    assert result.seconds == pytest.approx(0.082)
    assert result.output_tokens_per_s == pytest.approx(10 / 0.082)
    assert result.total_tokens_per_s == pytest.approx(42 / 0.082)
    assert result.requests_per_s == pytest.approx(1 / 0.082)
    assert result.ttft_ms.p50 == pytest.approx(8.2)
    assert (result.itl_ms.num_samples, result.itl_ms.max) == (9, pytest.approx(8.2))
    steps = result.steps
    assert (steps.num_steps, steps.num_prefill_tokens, steps.num_decode_tokens) == (10, 32, 9)
    assert (steps.mean_batch, steps.step_ms.mean) == (1.0, pytest.approx(8.2))
    assert steps.decode_step_ms.num_samples == 9
    assert steps.budget_use == pytest.approx(41 / (10 * 2048))
    shares = steps.shares
    assert (shares.schedule, shares.finish) == (0.0, 0.0)
    assert shares.prepare == pytest.approx(0.2 / 8.2)
    assert shares.model == pytest.approx(8.0 / 8.2)


def test_preemptions_are_counted_and_cost_no_token() -> None:
    submits = some(24, longest=300)
    result, requests = measure(*engine(num_blocks=128), submits)
    assert result.num_preemptions > 0
    assert result.steps.num_preemptions == result.num_preemptions
    assert result.num_finished == len(requests) == 24
    scheduled = result.steps.num_prefill_tokens + result.steps.num_decode_tokens
    assert scheduled > result.num_prompt_tokens + result.num_output_tokens - 24


def test_prefix_cache_hits_are_counted() -> None:
    prompt = [7] * 64
    short = SamplingParams(max_tokens=2)
    submits = [Submit(prompt_token_ids=[*prompt, each], sampling=short) for each in range(3)]
    result, _ = measure(*engine(max_num_seqs=1), submits)
    assert result.num_cached_tokens == 2 * 64


def test_warm_up_requests_are_neither_counted_nor_left_in_the_prefix_cache() -> None:
    submits = some(6)
    alone, _ = measure(*engine(), submits)
    core, intake = engine()
    warm, _ = measure(core, intake, submits, warmup=submits)
    assert warm.num_cached_tokens == 0
    assert warm.num_output_tokens == alone.num_output_tokens
    assert warm.steps.num_steps == alone.steps.num_steps
    assert warm.seconds == pytest.approx(alone.seconds)


def test_without_telemetry_tokens_are_still_counted() -> None:
    result, _ = measure(*engine(telemetry=False), some(5))
    assert (result.num_finished, result.steps) == (5, None)


def test_bench_progress_is_the_share_of_generated_tokens() -> None:
    told: list[tuple[str, float, str]] = []
    result, _ = measure(*engine(), some(8), some(2, seed=1), lambda *each: told.append(each))
    phases = [what for what, _, _ in told]
    assert phases == sorted(phases, reverse=True)  # the warm-up, then the measured run
    measured = [(share, detail) for what, share, detail in told if what == "measuring"]
    assert len(measured) > 3
    numbers = [int(detail.split()[2].replace(",", "")) for _, detail in measured]
    assert numbers == sorted(numbers)
    share, detail = measured[-1]
    assert share == pytest.approx(numbers[-1] / result.num_output_tokens)
    assert "/8 finished, " in detail


class DoesAt(SimulatedRunner):
    """Does something while it executes step number `n`."""

    def __init__(self, n: int, do: Callable[[], object]) -> None:
        super().__init__(CostModel())
        self.num_steps = 0
        self._n, self._do = n, do

    def execute(self, step: ScheduledStep) -> StepResult:
        self.num_steps += 1
        if self.num_steps == self._n:
            self._do()
        return super().execute(step)


def test_an_interrupted_run_reports_what_it_measured_so_far() -> None:
    runner = DoesAt(30, lambda: core.inbox.put(Call(Shutdown(), SilentClient())))  # as a signal
    core, intake = engine(runner=runner)
    result, requests = measure(core, intake, some(10))
    assert result.is_partial
    assert result.num_failed == 0
    assert 0 < result.num_finished < 10
    assert result.num_output_tokens == sum(each.num_output_tokens for each in requests)
    assert result.steps.num_steps == runner.num_steps <= 31


def test_requests_that_end_early_are_failures(caplog: pytest.LogCaptureFixture) -> None:
    result, _ = measure(*engine(runner=DoesAt(5, lambda: 1 // 0)), some(4))
    assert (result.num_finished, result.num_failed, result.is_partial) == (0, 4, False)
    assert all("ended by abort after 4 of" in message for message in result.failures)
    assert "step 4 failed" in caplog.text


def test_requests_the_engine_refuses_are_failures() -> None:
    core, intake = engine(max_waiting=3)
    result, _ = measure(core, intake, some(5))
    assert (result.num_finished, result.num_failed) == (3, 2)
    assert next(iter(result.failures)).startswith("3 requests are waiting already")


@given(st.lists(st.integers(0, 10**12), max_size=60))
def test_percentiles_are_real_samples_and_ascending(samples_ns: list[int]) -> None:
    percentiles = Percentiles.of_ns(samples_ns)
    if percentiles is None:
        assert not samples_ns
        return
    p = percentiles
    assert p.p50 <= p.p90 <= p.p99 <= p.max == max(samples_ns) / 1e6
    assert min(samples_ns) / 1e6 <= p.mean * (1 + 1e-12) + 1e-9
    for value, share in ((p.p50, 0.5), (p.p90, 0.9), (p.p99, 0.99)):
        assert any(value == each / 1e6 for each in samples_ns)
        assert sum(each / 1e6 <= value for each in samples_ns) >= share * len(samples_ns)
