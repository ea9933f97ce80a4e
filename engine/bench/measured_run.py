"""Runs an engine's loop until the given requests have ended, and measures it by its step records.

The requests come from this process, all at once. Everything here runs on the engine's thread.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import msgspec

from stepscope.engine.control.intake import Intake
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.loop.outlet import TelemetrySink
from stepscope.engine.protocol.commands import ResetPrefixCache, Submit
from stepscope.engine.protocol.replies import AnyReply, Error, Output, Submitted
from stepscope.engine.protocol.wire import Preempted, Telemetry
from stepscope.engine.scheduling.request import Request
from stepscope.engine.telemetry.step_draft import StepDraft


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Mean, percentiles and maximum of a sample, in milliseconds."""

    num_samples: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of_ns(cls, samples_ns: Sequence[int]) -> "Percentiles | None":
        """Compute the percentiles by nearest rank. None for an empty sample."""
        if not samples_ns:
            return None
        num, ordered = len(samples_ns), [each / 1e6 for each in sorted(samples_ns)]
        p50, p90, p99 = (ordered[math.ceil(share * num) - 1] for share in (0.5, 0.9, 0.99))
        mean = sum(samples_ns) / num / 1e6
        return cls(num_samples=num, mean=mean, p50=p50, p90=p90, p99=p99, max=ordered[-1])


class StepShares(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the steps' total time spent in each of four phases. They add up to 1."""

    schedule: float
    prepare: float  # laying out the batch
    model: float  # forward pass and sampling
    finish: float  # updating state, sending tokens to clients, publishing the record


class MeteredStep(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics over all steps of one run."""

    num_steps: int
    num_prefill_tokens: int  # recomputed tokens included
    num_decode_tokens: int
    num_preemptions: int
    num_hit_tokens: int  # prompt tokens found in the prefix cache, ...
    num_queried_tokens: int  # ... and those looked up there
    mean_batch: float  # requests in a step
    budget_use: float  # scheduled tokens as a share of the token budget
    step_ms: Percentiles  # from the start of scheduling to the published record
    decode_step_ms: Percentiles | None  # of the steps without prefill tokens
    shares: StepShares


class StepMeter:
    """A telemetry sink that counts step records and forwards every message to `sink`."""

    def __init__(self, sink: TelemetrySink, clock: Callable[[], int]) -> None:
        self.next_sequence = sink.next_sequence
        self.num_dropped = sink.num_dropped
        self._sink = sink
        self._clock = clock
        self.reset(first_step=0)

    def reset(self, first_step: int) -> None:
        """Clear all statistics. From now on, only steps from number `first_step` on count."""
        self._first_step = first_step
        self._end_ns = 0  # of the last step
        self._phases_ns: list[list[int]] = []  # of each step: schedule, prepare, model, finish
        self._counts: list[tuple[int, ...]] = []  # of each step, as `summary` names them

    def publish(self, message: Telemetry) -> None:
        self._sink.publish(message)
        self.next_sequence = self._sink.next_sequence
        self.num_dropped = self._sink.num_dropped
        if isinstance(message, StepDraft) and message.step >= self._first_step:
            self._add(message, self._clock())

    def _add(self, record: StepDraft, end_ns: int) -> None:
        times_ns = (
            record.schedule_start_ns,
            record.schedule_end_ns or 0,
            record.launch_ns or 0,
            record.tokens_ns,
        )
        # A step may be prepared while the step before it runs: count it from that step's end.
        _, *borders_ns = accumulate(times_ns, max, initial=self._end_ns)
        self._end_ns = end_ns
        self._phases_ns.append([b - a for a, b in pairwise((*borders_ns, end_ns))])
        kv = record.kv
        self._counts.append(
            (
                record.num_prefill_tokens,
                record.num_decode_tokens,
                sum(isinstance(event, Preempted) for event in record.events),
                0 if kv is None else kv.hit_tokens,
                0 if kv is None else kv.queried_tokens,
                len(msgspec.msgpack.decode(record.batch, type=list[msgspec.Raw])),
                record.token_budget or 0,
            )
        )

    def summary(self) -> MeteredStep | None:
        """Return the statistics of the steps since `reset`. None if there was no step."""
        steps_ns = [sum(each) for each in self._phases_ns]
        step_ms = Percentiles.of_ns(steps_ns)
        if step_ms is None:
            return None
        prefill, decode, preempted, hit, queried, rows, budget = map(
            sum, zip(*self._counts, strict=True)
        )
        total_ns = sum(steps_ns) or 1
        phases_ns = map(sum, zip(*self._phases_ns, strict=True))
        schedule, prepare, model, finish = (each / total_ns for each in phases_ns)
        return MeteredStep(
            num_steps=len(steps_ns),
            num_prefill_tokens=prefill,
            num_decode_tokens=decode,
            num_preemptions=preempted,
            num_hit_tokens=hit,
            num_queried_tokens=queried,
            mean_batch=rows / len(steps_ns),
            budget_use=(prefill + decode) / (budget or prefill + decode),
            step_ms=step_ms,
            decode_step_ms=Percentiles.of_ns(
                [ns for ns, counts in zip(steps_ns, self._counts, strict=True) if not counts[0]]
            ),
            shares=StepShares(schedule=schedule, prepare=prepare, model=model, finish=finish),
        )


_TICK_NS = 200_000_000  # between two reports of progress

# What runs now, the share of the output tokens that are there, and more in words.
Progress: TypeAlias = Callable[[str, float, str], None]


class ThroughputResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run. Rates cover the time from the first submit to the last token."""

    is_partial: bool  # interrupted: the figures cover what ran until then
    num_requests: int
    num_finished: int
    num_failed: int
    failures: dict[str, int]  # number of failures by message
    num_prompt_tokens: int  # of the requests that got at least one token
    num_output_tokens: int
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts and outputs
    requests_per_s: float
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    num_preemptions: int
    ttft_ms: Percentiles | None  # from the submit of all requests, so it includes queueing
    itl_ms: Percentiles | None  # gaps between two tokens of a request
    steps: MeteredStep | None  # None without telemetry


def measure(
    core: EngineCore,
    intake: Intake,
    measured: list[Submit],
    warmup: Sequence[Submit] = (),
    progress: Progress = lambda what, share, detail: None,
) -> tuple[ThroughputResult, list[Request]]:
    """Run the loop of an engine until the given requests have ended.

    Empties the prefix cache before it submits the measured requests.

    Returns the results, and the requests in the order they were submitted.

    Raises ConfigError: the engine refuses one of the requests.
    """
    sink = core.outlet.sink
    meter = StepMeter(sink, core.runner.clock) if sink is not None else None
    core.outlet.sink = meter
    try:
        run = _MeasuredRun(core, intake, measured, warmup, meter, progress)
        core.run()
        return run.measurement()
    finally:
        core.outlet.sink = sink


@dataclass(slots=True, eq=False)
class _RequestFollower:
    """The client of one request. Records when the tokens of the request arrived."""

    run: "_MeasuredRun"
    request: Request | None = None
    last_token_ns: int | None = None

    def reply(self, message: AnyReply) -> None:
        if isinstance(message, Output):
            self.run.on_output(self, message)
        elif isinstance(message, Submitted):
            self.request = self.run.core.scheduler.requests[message.request_id]
        elif isinstance(message, Error):
            self.run.on_end(message.message)


class _MeasuredRun:
    """One run: submits the warm-up, then the measured requests, then stops the engine's loop."""

    def __init__(
        self,
        core: EngineCore,
        intake: Intake,
        measured: Sequence[Submit],
        warmup: Sequence[Submit],
        meter: StepMeter | None,
        progress: Progress,
    ) -> None:
        self.core = core
        self._meter = meter
        self._progress = progress
        self._warmup = [(submit, intake.prepare(submit)) for submit in warmup]
        self._measured = [(submit, intake.prepare(submit)) for submit in measured]
        self._failures: Counter[str] = Counter()
        self._next_tick_ns = 0
        self._begin(self._warmup or self._measured, is_warmup=bool(self._warmup))

    def _clear(self) -> None:
        self._followers: list[_RequestFollower] = []
        self._num_finished = self._num_output_tokens = 0
        self._itl_ns: list[int] = []
        self._start_ns = self._end_ns = self.core.runner.clock()
        if self._meter is not None:
            self._meter.reset(self.core.next_step)

    def _begin(self, prepared: list[tuple[Submit, list[int]]], *, is_warmup: bool) -> None:
        self._clear()
        self._is_warmup = is_warmup
        self._num_open = len(prepared)
        self._num_asked_tokens = sum(submit.sampling.max_tokens for submit, _ in prepared)
        self._followers = [_RequestFollower(self) for _ in prepared]
        if not is_warmup:
            self.core.inbox.put(Call(ResetPrefixCache(), SilentClient()))
        for (submit, token_ids), follower in zip(prepared, self._followers, strict=True):
            self.core.inbox.put(Call(submit, follower, token_ids))

    def on_output(self, follower: _RequestFollower, output: Output) -> None:
        request = follower.request
        assert request is not None, "a request is submitted before it has output"
        if output.token_ids:
            now_ns = request.last_token_ns
            assert now_ns is not None
            if follower.last_token_ns is not None:
                self._itl_ns.append(now_ns - follower.last_token_ns)
            follower.last_token_ns = now_ns
            self._num_output_tokens += len(output.token_ids)
            self._end_ns = now_ns
            if now_ns >= self._next_tick_ns:
                self._next_tick_ns = now_ns + _TICK_NS
                self._report((now_ns - self._start_ns) / 1e9)
        if output.finish_reason is None:
            return
        if output.num_output_tokens == request.sampling.max_tokens:
            self._num_finished += 1
            self.on_end(None)
        elif not self.core.stopping:
            done = f"{output.num_output_tokens} of {request.sampling.max_tokens} tokens"
            self.on_end(f"ended by {output.finish_reason} after {done}")

    def _report(self, seconds: float) -> None:
        num_tokens, number = self._num_output_tokens, len(self._followers)
        rate = num_tokens / seconds if seconds else 0.0
        detail = f"{self._num_finished:,}/{number:,} finished, {num_tokens:,} tokens"
        what = "warming up" if self._is_warmup else "measuring"
        self._progress(what, num_tokens / self._num_asked_tokens, f"{detail}, {rate:,.0f} tokens/s")

    def on_end(self, failure: str | None) -> None:
        """Count the end of one request. After the last one, start the next phase or stop."""
        if failure is not None:
            self._failures[failure] += 1
        self._num_open -= 1
        if self._num_open:
            return
        if self._is_warmup and not self._failures:
            self._begin(self._measured, is_warmup=False)
        else:
            self.core.stop()

    def measurement(self) -> tuple[ThroughputResult, list[Request]]:
        if self._is_warmup:
            self._clear()  # it was interrupted
        requests = [each.request for each in self._followers if each.request is not None]
        begun = [each for each in requests if each.first_token_ns is not None]
        num_prompt_tokens = sum(each.num_prompt_tokens for each in begun)
        seconds = (self._end_ns - self._start_ns) / 1e9
        per_s = 1 / seconds if seconds else 0.0
        result = ThroughputResult(
            is_partial=self._num_finished + self._failures.total() < len(self._measured),
            num_requests=len(self._measured),
            num_finished=self._num_finished,
            num_failed=self._failures.total(),
            failures=dict(self._failures),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            seconds=seconds,
            output_tokens_per_s=self._num_output_tokens * per_s,
            total_tokens_per_s=(self._num_output_tokens + num_prompt_tokens) * per_s,
            requests_per_s=self._num_finished * per_s,
            num_cached_tokens=sum(each.num_cached_tokens for each in begun),
            num_preemptions=sum(each.num_preemptions for each in requests),
            ttft_ms=Percentiles.of_ns(
                [each.first_token_ns - self._start_ns for each in begun if each.first_token_ns]
            ),
            itl_ms=Percentiles.of_ns(self._itl_ns),
            steps=self._meter.summary() if self._meter is not None else None,
        )
        return result, requests
