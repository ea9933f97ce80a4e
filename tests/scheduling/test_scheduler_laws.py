"""Laws that hold for every workload, whichever knobs an operator changes while it runs.

A driver plays the engine: it adds and aborts requests, replaces the knobs between steps, and keeps
its own model of what a runner would have written into each slot of each block.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, StepResult
from stepscope.engine.telemetry.batch_rows import BatchRows
from stepscope.engine.telemetry.step_draft import StepDraft
from tests.support.engines.kv_integrity import check_integrity
from tests.support.engines.scheduled_loads import (
    LIMITS,
    MAX_MODEL_LEN,
    STOP_TOKEN,
    contents_of,
    knob_sets,
    laws,
    prompts,
)


@dataclass
class Arrival:
    step: int
    prompt: list[int]
    max_tokens: int
    priority: int
    can_stop: bool
    abort_after: int | None  # steps after its arrival


@dataclass
class Case:
    block_size: int
    num_blocks: int
    knobs: dict[int, Knobs]  # step -> in force from it on
    arrivals: list[Arrival]
    reset_at: int


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    prompt = draw(prompts())
    return Arrival(
        step=draw(st.sampled_from([0, 0, 1, 2, 5, 30])),
        prompt=prompt,
        max_tokens=draw(st.integers(1, MAX_MODEL_LEN - len(prompt))),
        priority=draw(st.integers(-1, 2)),
        can_stop=draw(st.sampled_from([False, False, True])),
        abort_after=draw(st.sampled_from([None, None, None, None, 0, 7])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    at_least = -(-MAX_MODEL_LEN // block_size)
    changes = draw(st.dictionaries(st.integers(1, 60), knob_sets(), max_size=5))
    return Case(
        block_size=block_size,
        num_blocks=at_least + draw(st.sampled_from([0, 1, 2, at_least // 2, at_least])),
        knobs={0: draw(knob_sets()), **changes},
        arrivals=draw(st.lists(arrivals(), min_size=1, max_size=14)),
        reset_at=draw(st.integers(0, 60)),
    )


@dataclass
class Life:
    """What the driver saw of one request."""

    num_scheduled: int = 0
    num_hit: int = 0
    num_lost: int = 0  # computed tokens that a preemption threw away
    first_tokens: int = 0
    end: str | None = None


@dataclass
class Driver:
    case: Case
    scheduler: Scheduler = field(init=False)
    lives: dict[int, Life] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) -> content
    blocks: list[tuple[int, int]] = field(init=False)  # (owner, references), from the moves
    records: list[bytes] = field(default_factory=list)  # as they go over the wire
    num_held_steps: int = 0  # in a row

    def __post_init__(self) -> None:
        kv = KVCacheManager(self.case.num_blocks, self.case.block_size)
        self.scheduler = Scheduler(kv, self.case.knobs[0], LIMITS)
        self.blocks = [(wire.EMPTY, 0)] * self.case.num_blocks

    def run(self) -> None:
        last_arrival = max(arrival.step for arrival in self.case.arrivals)
        step = 0
        max_steps = 100 + 10 * sum(len(a.prompt) + a.max_tokens for a in self.case.arrivals)
        while step <= last_arrival or self.scheduler.has_work():
            assert step < max_steps, "livelock"
            self.between_steps(step)
            self.one_step()
            step += 1

    def between_steps(self, step: int) -> None:
        for number, arrival in enumerate(self.case.arrivals):
            if arrival.step == step:
                self.arrive(number, arrival)
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                self.scheduler.abort(number, "the client went away")
        if step in self.case.knobs:
            self.scheduler.knobs = self.case.knobs[step]
        if step == self.case.reset_at:
            self.scheduler.kv.reset_prefix_cache()
        check_integrity(self.scheduler.kv)

    def arrive(self, number: int, arrival: Arrival) -> None:
        sampling = SamplingParams(
            max_tokens=arrival.max_tokens, stop_token_ids=(STOP_TOKEN,) * arrival.can_stop
        )
        request = Request(
            number, arrival.prompt, sampling, arrival_ns=arrival.step, priority=arrival.priority
        )
        self.requests[number] = request
        self.lives[number] = Life()
        self.scheduler.add(request)

    def one_step(self) -> None:
        scheduler = self.scheduler
        num_running = len(scheduler.running)
        computed = {r.request_id: r.num_computed_tokens for r in scheduler.running}
        rows = scheduler.schedule()
        check_integrity(scheduler.kv)
        self.check_rows(rows, num_running)
        self.check_batching(rows, num_running)
        self.check_cadence(rows)
        self.execute(rows)
        batch = BatchRows(scheduler).encode(rows)
        draft = StepDraft.open(len(self.records), (0, 0), batch, scheduler, knobs_version=0)
        token_ids = [self.token_after(row) for row in rows]
        scheduler.update(rows, token_ids)
        draft.end(StepResult(token_ids, launch_ns=0, tokens_ns=0), scheduler.kv)
        draft.num_running, draft.num_waiting = len(scheduler.running), len(scheduler.waiting)
        draft.events = scheduler.drain_events()
        self.records.append(wire.encode(draft))
        told = wire.decode(self.records[-1])
        self.check_record(told, rows)
        self.take_events(told.events, computed)
        self.check_blocks(told)

    def check_rows(self, rows: list[ScheduledRow], num_running: int) -> None:
        scheduler, knobs = self.scheduler, self.scheduler.knobs
        num_tokens = sum(row.num_tokens for row in rows)
        assert scheduler.num_padded_tokens >= 0
        assert num_tokens + scheduler.num_padded_tokens <= knobs.max_num_batched_tokens
        assert len({row.request.request_id for row in rows}) == len(rows)
        if scheduler.admitted_now:
            assert len(scheduler.running) <= knobs.max_num_seqs
        else:
            assert len(scheduler.running) <= num_running
        assert set(scheduler.resumed_now) <= set(scheduler.admitted_now)
        assert len(scheduler.waiting) + len(scheduler.running) == len(scheduler.requests)
        assert sum(scheduler.waiting_reasons().values()) == len(scheduler.waiting)
        for request, phase, start, num_tokens, samples in rows:
            end = start + num_tokens
            assert request.status is RequestStatus.RUNNING
            assert start == request.num_computed_tokens
            assert num_tokens >= 1
            assert samples == (end == request.num_tokens)
            assert phase == expected_phase(request, start, num_tokens)
            if not knobs.enable_chunked_prefill:
                assert samples, "a prompt was cut"
            hit = scheduler.admitted_now.get(request.request_id, start)
            assert start == hit
            self.lives[request.request_id].num_scheduled += num_tokens
        for number, hit in scheduler.admitted_now.items():
            self.lives[number].num_hit += hit

    def check_batching(self, rows: list[ScheduledRow], num_running: int) -> None:
        """Check what each mode guarantees beyond the laws of all modes."""
        scheduler, knobs = self.scheduler, self.scheduler.knobs
        batching, admitted = knobs.batching, scheduler.admitted_now
        if batching == "naive":
            assert len(rows) <= 1
        if batching in ("naive", "static"):
            assert not (num_running and admitted), "somebody joined a batch under way"
        if batching != "static":
            assert scheduler.num_padded_tokens == 0
        if batching in ("continuous", "separate"):
            # A resumed request may have nothing but its newest token to compute.
            decodes = [
                r.phase is wire.Phase.DECODE and r.request.request_id not in admitted for r in rows
            ]
            assert all(decodes) or not any(decodes), "chunks and decodes share a step"
        if batching == "continuous":
            for row in rows:
                alone = len(rows) == 1 and row.num_tokens == knobs.max_num_batched_tokens
                assert row.samples or alone, "a prompt was cut that was not longer than the budget"

    def check_cadence(self, rows: list[ScheduledRow]) -> None:
        """Check that prefills are held for no longer than the interval, and for decodes alone."""
        if not self.scheduler.has_held_prefills:
            self.num_held_steps = 0
            return
        self.num_held_steps += 1
        assert self.num_held_steps < self.scheduler.knobs.prefill_schedule_interval
        assert all(row.num_tokens == 1 and row.samples for row in rows)

    def execute(self, rows: list[ScheduledRow]) -> None:
        """Let every row write its slots, then check all slots that each row attends to."""
        for request, _, start, num_tokens, _ in rows:
            contents = contents_of(request.token_ids)
            for position in range(start, start + num_tokens):
                self.slots[self.slot(request, position)] = contents[position]
        for request, _, start, num_tokens, _ in rows:
            contents = contents_of(request.token_ids)
            for position in range(start + num_tokens):
                assert self.slots[self.slot(request, position)] == contents[position]

    def slot(self, request: Request, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.case.block_size)
        return request.block_table[index], offset

    def token_after(self, row: ScheduledRow) -> int | None:
        if not row.samples:
            return None
        return (sum(row.request.token_ids) + row.request.num_tokens) % 5

    def check_record(self, record: wire.StepRecord, rows: list[ScheduledRow]) -> None:
        """Check that the record has the rows that ran and that their tokens add up."""
        told = [(row.request_id, row.phase, row.start, row.num_tokens) for row in record.batch]
        assert told == [(r.request.request_id, r.phase, r.start, r.num_tokens) for r in rows]
        for row, (request, _, _, _, samples) in zip(record.batch, rows, strict=True):
            flags = wire.RowFlag(row.flags)
            is_first = samples and request.num_output_tokens == 1
            assert (wire.RowFlag.LAST_CHUNK in flags) == samples
            assert (wire.RowFlag.FIRST_TOKEN in flags) == is_first
            assert (wire.RowFlag.RESUMED in flags) == (row.request_id in self.scheduler.resumed_now)
            assert row.num_cached_tokens == self.scheduler.admitted_now.get(row.request_id, 0)
        assert record.num_decode_tokens == sum(
            row.phase == wire.Phase.DECODE for row in record.batch
        )
        spent = record.num_prefill_tokens + record.num_decode_tokens
        assert spent == sum(row.num_tokens for row in record.batch)
        assert (record.num_padded_tokens or 0) == self.scheduler.num_padded_tokens
        assert spent + self.scheduler.num_padded_tokens <= (record.token_budget or 0)

    def take_events(self, events: list[wire.RequestEvent], computed: dict[int, int]) -> None:
        preempted = [event for event in events if isinstance(event, wire.Preempted)]
        if preempted:
            assert not self.scheduler.admitted_now
        for event in events:
            life = self.lives[event.request_id]
            match event:
                case wire.Preempted():
                    life.num_lost += computed[event.request_id]
                case wire.FirstToken():
                    life.first_tokens += 1
                case wire.Finished() | wire.Aborted():
                    assert life.end is None
                    life.end = event.reason

    def check_blocks(self, record: wire.StepRecord) -> None:
        """Check that block moves alone give an observer the state of every block."""
        kv, counts = self.scheduler.kv, record.kv
        for move in record.moves:
            self.blocks[move.block_id] = (move.owner, move.ref_count)
        runs = [(run.owner, run.ref_count) for run in kv.runs() for _ in range(run.count)]
        assert runs == self.blocks
        states = Counter(owner if owner < 0 else 0 for owner, _ in runs)
        assert (counts.used, counts.cached, counts.empty) == (
            states[0],
            states[wire.CACHED],
            states[wire.EMPTY],
        )
        assert sum(references for _, references in runs) == kv.num_held


def expected_phase(request: Request, start: int, num_tokens: int) -> wire.Phase:
    if start < request.high_water:
        return wire.Phase.RECOMPUTE
    if start >= request.num_prompt_tokens and start == request.num_tokens - 1 and num_tokens == 1:
        return wire.Phase.DECODE
    return wire.Phase.PREFILL


@laws
@given(cases())
def test_no_step_breaks_a_scheduling_law_and_every_request_ends(case: Case) -> None:
    driver = Driver(case)
    driver.run()
    for number, life in driver.lives.items():
        request = driver.requests[number]
        assert request.status is RequestStatus.FINISHED
        assert life.end is not None, f"request {number} was lost"
        if request.finish_reason == "abort":
            continue
        ended_by = request.token_ids[-1]
        if request.finish_reason == "stop":
            assert ended_by == STOP_TOKEN
        else:
            assert request.num_output_tokens == request.sampling.max_tokens
        assert life.first_tokens == 1
        once = request.num_prompt_tokens + request.num_output_tokens - 1
        assert life.num_scheduled == once - life.num_hit + life.num_lost
    check_idle(driver)


def check_idle(driver: Driver) -> None:
    counts = driver.scheduler.kv.counts()
    assert counts.used == 0
    assert counts.cached + counts.empty == driver.case.num_blocks
    driver.scheduler.kv.reset_prefix_cache()
    assert driver.scheduler.kv.counts().empty == driver.case.num_blocks


@settings(laws, max_examples=20)
@given(cases())
def test_the_same_input_gives_the_same_records_byte_for_byte(case: Case) -> None:
    first, second = Driver(case), Driver(case)
    first.run()
    second.run()
    assert first.records == second.records


@settings(laws, max_examples=25)
@given(cases())
def test_with_blocks_reserved_for_the_output_no_request_is_ever_preempted(case: Case) -> None:
    case.knobs = {
        step: msgspec.structs.replace(knobs, reserve="output") for step, knobs in case.knobs.items()
    }
    driver = Driver(case)
    driver.run()
    assert not any(request.num_preemptions for request in driver.requests.values())
