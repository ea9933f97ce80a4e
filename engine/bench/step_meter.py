"""`StepMeter`: computes statistics of the step records on their way to the publisher."""

import math
from collections.abc import Callable, Sequence

import msgspec

from stepscope.engine.loop.outlet import TelemetrySink
from stepscope.engine.protocol.wire import Preempted, Telemetry
from stepscope.engine.telemetry.batch_rows import num_rows
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
        ordered = sorted(samples_ns)

        def rank(share: float) -> float:
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)] / 1e6

        return cls(
            num_samples=len(ordered),
            mean=sum(ordered) / len(ordered) / 1e6,
            p50=rank(0.5),
            p90=rank(0.9),
            p99=rank(0.99),
            max=ordered[-1] / 1e6,
        )


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
        self._step_ns: list[int] = []
        self._decode_step_ns: list[int] = []
        self._phase_ns = [0, 0, 0, 0]
        self._num_rows = 0
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0
        self._num_budgeted_tokens = 0
        self._num_preemptions = 0
        self._num_hit_tokens = 0
        self._num_queried_tokens = 0

    def publish(self, message: Telemetry) -> None:
        self._sink.publish(message)
        self.next_sequence = self._sink.next_sequence
        self.num_dropped = self._sink.num_dropped
        if isinstance(message, StepDraft) and message.step >= self._first_step:
            self._add(message, self._clock())

    def _add(self, record: StepDraft, end_ns: int) -> None:
        # A step may be prepared while the step before it runs: count it from that step's end.
        start_ns = max(record.schedule_start_ns, self._end_ns)
        schedule_end_ns = max(record.schedule_end_ns or 0, start_ns)
        launch_ns = max(record.launch_ns or 0, schedule_end_ns)
        tokens_ns = max(record.tokens_ns, launch_ns)
        self._end_ns = end_ns
        step_ns = end_ns - start_ns
        self._step_ns.append(step_ns)
        if not record.num_prefill_tokens:
            self._decode_step_ns.append(step_ns)
        borders_ns = (start_ns, schedule_end_ns, launch_ns, tokens_ns, end_ns)
        for i in range(4):
            self._phase_ns[i] += borders_ns[i + 1] - borders_ns[i]
        self._num_rows += num_rows(record.batch)
        self._num_prefill_tokens += record.num_prefill_tokens
        self._num_decode_tokens += record.num_decode_tokens
        self._num_budgeted_tokens += record.token_budget or 0
        self._num_preemptions += sum(isinstance(event, Preempted) for event in record.events)
        if record.kv is not None:
            self._num_hit_tokens += record.kv.hit_tokens
            self._num_queried_tokens += record.kv.queried_tokens

    def summary(self) -> MeteredStep | None:
        """Return the statistics of the steps since `reset`. None if there was no step."""
        step_ms = Percentiles.of_ns(self._step_ns)
        if step_ms is None:
            return None
        num_tokens = self._num_prefill_tokens + self._num_decode_tokens
        total_ns = sum(self._phase_ns) or 1
        schedule, prepare, model, finish = (each / total_ns for each in self._phase_ns)
        return MeteredStep(
            num_steps=len(self._step_ns),
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_preemptions=self._num_preemptions,
            num_hit_tokens=self._num_hit_tokens,
            num_queried_tokens=self._num_queried_tokens,
            mean_batch=self._num_rows / len(self._step_ns),
            budget_use=num_tokens / (self._num_budgeted_tokens or num_tokens),
            step_ms=step_ms,
            decode_step_ms=Percentiles.of_ns(self._decode_step_ns),
            shares=StepShares(schedule=schedule, prepare=prepare, model=model, finish=finish),
        )
