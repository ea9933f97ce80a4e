"""`StepMeter`: computes statistics of the step records on their way to the publisher."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

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
                num_rows(record.batch),
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
