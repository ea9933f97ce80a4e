"""`Replica`: one engine on a virtual clock, with the real scheduler and modelled step times.

It publishes no telemetry. It keeps no steps and no finished requests, so a run of any length takes
the same memory; results go to a `FigureSink`.

While all running requests decode and no request can join them, it takes a short cut through several
steps: the clock advances step by step, but the scheduler's state is updated only once for all of
them. `tests/simulation/test_replica.py` compares the result with scheduling every step.

With overlap, each step is scheduled when the one before it begins, as in the engine (`Pipeline`).
"""

from typing import NamedTuple, Protocol, TypeAlias

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import Preempted, RequestView
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep
from stepscope.engine.simulation.step_time import StepShape, StepTimeModel, shape_of
from stepscope.engine.simulation.virtual_requests import BlockNames, SimulatedRequest

_MODES_WITH_STRETCHES = ("continuous", "separate", "chunked")
_MIN_STRETCH = 3  # steps; a shorter stretch is not worth its preparation


# A finished request, simulated or recorded.
EndedRequest: TypeAlias = Request | RequestView


class FigureSink(Protocol):
    """Collects the results of a simulated engine, for its metrics. All times in nanoseconds."""

    def add_step(self, num_prefill_tokens: int, num_decode_tokens: int, num_steps: int) -> None:
        """Add `num_steps` steps with these numbers of tokens each."""

    def add_gaps(self, gap_ns: int, count: int) -> None:
        """Add `count` inter-token latencies of `gap_ns` each."""

    def add_first(self, ttft_ns: int) -> None: ...

    def add_preemption(self) -> None: ...

    def add_finished(self, request: EndedRequest, worst_itl_ns: int) -> None:
        """Add a request. `worst_itl_ns` is the longest gap between two of its tokens."""


class _Launched(NamedTuple):
    rows: list[ScheduledRow]
    num_prefill_tokens: int
    num_decode_tokens: int
    end_ns: int


class Replica:
    """A simulated engine; runs steps until a given time, or until all requests have finished.

    Args:
        overlap: schedule a step while the one before it runs, if it does not need that one's
            tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: StepTimeModel,
        sink: FigureSink,
        *,
        overlap: bool = False,
    ) -> None:
        self.now_ns = 0
        self.scheduler = scheduler
        self._model = model
        self._sink = sink
        self._overlap = overlap
        self._names = BlockNames(scheduler.kv.block_size)
        self._next_id = 0
        self._next_step = 0
        self._next_knobs: Knobs | None = None
        self._ahead: _Launched | None = None  # the step in flight after the last ended one
        self._device_free_ns = 0
        self._tokens_ns = 0  # when the tokens of the last step were known
        self._all_decode = False  # all requests decode in the next step, if none joins

    def submit(self, wanted: SimulatedRequest) -> None:
        """Add a request at its arrival time; if a step runs then, the request is added after it."""
        request = Request(
            request_id=self._next_id,
            prompt_token_ids=[0] * wanted.num_prompt_tokens,
            sampling=wanted.sampling,
            arrival_ns=wanted.arrival_ns,
            client_id=wanted.name,
            priority=wanted.priority,
        )
        request.block_hashes = self._names.of(wanted)
        self._next_id += 1
        self.now_ns = max(self.now_ns, wanted.arrival_ns)
        self._all_decode = False
        self.scheduler.add(request)

    def set_knobs(self, knobs: Knobs, time_ns: int) -> None:
        """Set the knobs from the next step on, which is scheduled after the step in flight ends."""
        self.now_ns = max(self.now_ns, time_ns)
        self._all_decode = False
        self._next_knobs = knobs

    def run_until(self, time_ns: int) -> None:
        """Run every step that begins before `time_ns`."""
        scheduler = self.scheduler
        while self.now_ns < time_ns and scheduler.has_work():
            if self._all_decode:
                self._skip_decodes(time_ns)
                if self.now_ns >= time_ns:
                    return
            self._step()

    def run_to_end(self) -> None:
        while self.scheduler.has_work():
            self.run_until(self.now_ns + 3_600_000_000_000)

    def _step(self) -> None:
        scheduler, ahead = self.scheduler, self._ahead
        self._ahead = None
        if self._next_knobs is not None:
            if ahead is not None:
                self._end(ahead)
                ahead = None
            scheduler.knobs, self._next_knobs = self._next_knobs, None
        step = ahead or self._launch()
        if step is not None:
            if self._overlap and scheduler.can_run_ahead(step.rows):
                scheduler.assume(step.rows)
                self._ahead = self._launch()
            self._end(step)
        for event in scheduler.drain_events():
            if isinstance(event, Preempted):
                self._sink.add_preemption()

    def _launch(self) -> _Launched | None:
        scheduler = self.scheduler
        rows = scheduler.schedule()
        if not rows:
            return None
        step = ScheduledStep(self._next_step, rows, scheduler.num_padded_tokens)
        self._next_step += 1
        end_ns = self._time_launched(shape_of(step))
        return _Launched(rows, scheduler.num_prefill_tokens, scheduler.num_decode_tokens, end_ns)

    def _time_launched(self, shape: StepShape) -> int:
        device_s, host_s, _, _ = self._model.step_time(shape)
        self.now_ns += round(host_s * 1e9)
        self._device_free_ns = max(self.now_ns, self._device_free_ns) + round(device_s * 1e9)
        return self._device_free_ns

    def _end(self, step: _Launched) -> None:
        scheduler, sink, rows = self.scheduler, self._sink, step.rows
        num_running = len(scheduler.running)
        self.now_ns = max(self.now_ns, step.end_ns)
        sink.add_step(step.num_prefill_tokens, step.num_decode_tokens, 1)
        finished = scheduler.update(rows, [0 if row[4] else None for row in rows])
        num_sampled = self._take_times(step)
        for request in finished:
            sink.add_finished(request, request.worst_itl_ns)
        ahead = self._ahead
        self._all_decode = (
            num_sampled == num_running
            and (not self._overlap or (ahead is not None and not ahead.num_prefill_tokens))
            and (ahead is None or len(ahead.rows) == len(scheduler.running))
        )

    def _take_times(self, step: _Launched) -> int:
        """Report the latencies of a step's new tokens to the sink; return the number of tokens."""
        before_ns, now_ns, sink = self._tokens_ns, step.end_ns, self._sink
        self._tokens_ns = now_ns
        num_sampled = num_in_turn = 0
        for row in step.rows:
            if not row[4]:
                continue
            num_sampled += 1
            request = row[0]
            last_ns = request.last_token_ns
            request.last_token_ns = now_ns
            if last_ns is None:
                request.first_token_ns = now_ns
                sink.add_first(now_ns - request.arrival_ns)
                continue
            if last_ns == before_ns:
                num_in_turn += 1
            else:
                sink.add_gaps(now_ns - last_ns, 1)
            if now_ns - last_ns > request.worst_itl_ns:
                request.worst_itl_ns = now_ns - last_ns
        if num_in_turn:
            sink.add_gaps(now_ns - before_ns, num_in_turn)
        return num_sampled

    def _skip_decodes(self, time_ns: int) -> None:
        """Run decode steps by the short cut, up to `time_ns` or until a request may end."""
        running, ahead = self.scheduler.running, self._ahead
        most = self._num_certain_steps()
        if most < _MIN_STRETCH:
            return
        num_rows = len(running)
        # All requests got a token in the step before, so their gaps are the step's duration.
        num_context = sum(request.num_computed_tokens for request in running)
        ends_ns = []  # ends of the steps in flight
        if ahead is not None:
            ends_ns.append(ahead.end_ns)
            num_context += num_rows
        num_steps = worst_ns = 0
        while num_steps < most and self.now_ns < time_ns:
            num_steps += 1
            num_context += num_rows
            shape = StepShape(num_rows, num_rows, 0, 0, num_context)
            ends_ns.append(self._time_launched(shape))
            end_ns = ends_ns.pop(0)
            self.now_ns = max(self.now_ns, end_ns)
            gap_ns = end_ns - self._tokens_ns
            worst_ns = max(worst_ns, gap_ns)
            self._sink.add_gaps(gap_ns, num_rows)
            self._tokens_ns = end_ns
        self._sink.add_step(0, num_rows, num_steps)
        self._next_step += num_steps
        self.scheduler.skip(num_steps - len(ends_ns))  # the last one is scheduled below
        kv, new_tokens = self.scheduler.kv, [0] * num_steps
        for request in running:
            num_tokens = request.num_computed_tokens + num_steps
            kv.grow(request, num_tokens)
            kv.register(request, num_tokens)
            request.num_computed_tokens = num_tokens
            request.token_ids += new_tokens
            request.last_token_ns = self._tokens_ns
            request.worst_itl_ns = max(request.worst_itl_ns, worst_ns)
        if ends_ns:
            self._ahead = _Launched(self.scheduler.schedule(), 0, num_rows, ends_ns[0])

    def _num_certain_steps(self) -> int:
        """Return for how many steps surely no request joins, ends, or lacks blocks."""
        scheduler = self.scheduler
        running, knobs = scheduler.running, scheduler.step_knobs
        num_rows = len(running)
        if (
            not num_rows
            or knobs.batching not in _MODES_WITH_STRETCHES
            or num_rows > knobs.max_num_batched_tokens
            or (scheduler.waiting and num_rows < knobs.max_num_seqs)
        ):
            return 0
        # The scheduler runs the step in which a request ends.
        most = min(request.max_num_tokens - len(request.token_ids) for request in running) - 1
        if most < _MIN_STRETCH:
            return 0
        kv = scheduler.kv
        num_needed = sum(
            kv.num_blocks_for(request.num_computed_tokens + most) - len(request.block_table)
            for request in running
        )
        if not self._overlap:
            return most if num_needed <= kv.num_free_blocks else 0
        # The last step remains in flight; `can_run_ahead` must be true for every step.
        num_spare = num_rows + knobs.max_num_batched_tokens // kv.block_size
        num_spare = min(num_spare, kv.num_outstanding_blocks - num_needed)
        return most - 1 if num_needed + num_spare <= kv.num_free_blocks else 0
