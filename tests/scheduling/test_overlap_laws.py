"""With overlap an engine behaves as without: laws for any load and any change.

A stand-in device replaces the model. It runs steps in the order of their launch, keeps what would
be in each slot of each block, and reports a row that reads foreign content. Its tokens are a
function of the tokens before them, so the output of each request is known beforehand.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import (
    Abort,
    Command,
    GetSnapshot,
    ResetPrefixCache,
    SetKnobs,
    Submit,
)
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import DeviceMemoryError, InFlight, ScheduledStep, StepResult
from stepscope.recordings.check.ledgers import BlockLedger
from stepscope.recordings.state.session import SessionState
from tests.support.engines.core_ends import Client, Sink
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
from tests.support.engines.simulated_run import simulated_info


def token_after(token_ids: list[int]) -> int:
    return (sum(token_ids) + len(token_ids)) % 5


def output_of(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """The output that a request must get, whatever else runs."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        tokens.append(token_after(tokens))
        if tokens[-1] in sampling.stop_token_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class Handle:
    result: StepResult
    tokens: dict[int, int]  # request -> what it samples
    has_failed: bool = False
    fails: bool = False

    def collect(self) -> StepResult:
        if self.fails:
            raise RuntimeError("the device failed")
        return self.result


@dataclass
class Device:
    """Runs steps at their launch and returns their results when collected.

    Attributes:
        failures: number of a launch -> whether it fails there, or when it is collected.
        unfit: numbers of launches for which there is no memory.
    """

    block_size: int
    failures: dict[int, bool] = field(default_factory=dict)
    unfit: set[int] = field(default_factory=set)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    num_launched: int = 0
    num_ahead: int = 0
    now_ns: int = 0

    def clock(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def execute(self, step: ScheduledStep) -> StepResult:
        return self.launch(step).collect()

    def launch(self, step: ScheduledStep) -> InFlight:
        number = self.num_launched
        self.num_launched += 1
        before = step.after
        assert before is None or isinstance(before, Handle)
        self.num_ahead += before is not None
        fails_now = self.failures.get(number)
        if fails_now:
            raise RuntimeError("the device took no more")
        if number in self.unfit:
            raise DeviceMemoryError
        is_void = fails_now is not None or (before is not None and before.has_failed)
        known = {}
        for row in step.rows:
            tokens = list(row.request.token_ids)
            if row.start == len(tokens):
                assert before is not None, "a token that nobody gives"
                tokens.append(before.tokens[row.request.request_id])
            known[row.request.request_id] = tokens[: row.start + row.num_tokens]
        for row in step.rows:
            contents = contents_of(known[row.request.request_id])
            for position in range(row.start, row.start + row.num_tokens):
                slot = self.slot(row.request.block_table, position)
                self.slots[slot] = -1 if is_void else contents[position]
        token_ids: list[int | None] = []
        for row in step.rows:
            name = row.request.request_id
            contents = contents_of(known[name])
            found = [
                self.slots.get(self.slot(row.request.block_table, p)) for p in range(len(contents))
            ]
            if not is_void and found != contents:
                self.problems.append(f"step {step.step}: request {name} reads {found}")
            token_ids.append(token_after(known[name]) if row.samples else None)
        tokens = {
            row.request.request_id: token
            for row, token in zip(step.rows, token_ids, strict=True)
            if token is not None
        }
        result = StepResult(token_ids, self.clock(), self.clock())
        # Results are published when they are collected.
        return Later(self, Handle(result, tokens, is_void, fails_now is False))

    def slot(self, table: list[int], position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        return table[index], offset


class Later(Handle):
    """A result whose tokens become known only when they are waited for."""

    def __init__(self, device: Device, handle: Handle) -> None:
        super().__init__(handle.result, handle.tokens, handle.has_failed, handle.fails)
        self._device = device

    def collect(self) -> StepResult:
        result = super().collect()
        return StepResult(result.token_ids, result.launch_ns, self._device.clock())


@dataclass
class Arrival:
    turn: int
    prompt: list[int]
    sampling: SamplingParams
    priority: int
    abort_after: int | None


@dataclass
class Case:
    block_size: int
    num_blocks: int
    knobs: Knobs
    changes: dict[int, Knobs]  # turn -> set then
    arrivals: list[Arrival]
    resets: set[int]
    snapshots: set[int]
    failures: dict[int, bool] = field(default_factory=dict)
    unfit: set[int] = field(default_factory=set)


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    prompt = draw(prompts())
    sampling = SamplingParams(
        max_tokens=draw(st.integers(1, MAX_MODEL_LEN - len(prompt))),
        stop_token_ids=(STOP_TOKEN,) * draw(st.booleans()),
        # It changes no token here, but prevents steps from being prepared ahead.
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.0, 1.0])),
    )
    return Arrival(
        draw(st.sampled_from([0, 0, 1, 2, 5, 20])),
        prompt,
        sampling,
        draw(st.integers(-1, 1)),
        draw(st.sampled_from([None, None, None, 0, 3, 9])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    at_least = -(-MAX_MODEL_LEN // block_size)
    return Case(
        block_size,
        at_least + draw(st.sampled_from([0, 1, at_least // 2, 3 * at_least])),
        draw(knob_sets()),
        draw(st.dictionaries(st.integers(1, 40), knob_sets(), max_size=3)),
        draw(st.lists(arrivals(), min_size=1, max_size=10)),
        draw(st.sets(st.integers(0, 40), max_size=2)),
        draw(st.sets(st.integers(0, 40), max_size=3)),
    )


class Run:
    """A case from its first arrival to its last token."""

    def __init__(self, case: Case, *, overlap: bool = True) -> None:
        self.case = case
        self.device = Device(case.block_size, case.failures, case.unfit)
        kv = KVCacheManager(case.num_blocks, case.block_size)
        self.scheduler = Scheduler(kv, case.knobs, LIMITS)
        self.sink = Sink()
        self.core = EngineCore(
            simulated_info(LIMITS, case.num_blocks, case.block_size, seed=0),
            self.device,
            self.scheduler,
            self.sink,
            overlap=overlap,
        )
        self.askers = [Client() for _ in case.arrivals]
        self.desk = Client()

    def run(self) -> None:
        core, turn = self.core, 0
        last = max(arrival.turn for arrival in self.case.arrivals)
        most = 200 + 20 * sum(len(a.prompt) + a.sampling.max_tokens for a in self.case.arrivals)
        while turn <= last or self.scheduler.has_work() or core.has_step_in_flight:
            assert turn < most, "livelock"
            for command, asker in self.commands(turn):
                token_ids = command.prompt_token_ids if isinstance(command, Submit) else None
                core.inbox.put(Call(command, asker, token_ids))
            core.step()
            check_integrity(self.scheduler.kv)
            core.publish_heartbeat(idle=not core.has_step_in_flight)
            turn += 1
        core.snapshots.serve(at_once=True)

    def commands(self, turn: int) -> Iterator[tuple[Command, Client]]:
        case = self.case
        for arrival, asker in zip(case.arrivals, self.askers, strict=True):
            if arrival.turn == turn:
                yield (
                    Submit(
                        prompt_token_ids=arrival.prompt,
                        sampling=arrival.sampling,
                        priority=arrival.priority,
                    ),
                    asker,
                )
            if arrival.abort_after is not None and arrival.turn + arrival.abort_after + 1 == turn:
                yield Abort(request_id=asker.replies[0].request_id), self.desk
        if turn in case.changes:
            yield SetKnobs(changes=case.changes[turn].as_dict()), self.desk
        if turn in case.resets:
            yield ResetPrefixCache(), self.desk
        if turn in case.snapshots:
            yield GetSnapshot(), self.desk

    @property
    def records(self) -> list[wire.StepRecord]:
        return self.sink.records

    def outputs(self) -> list[tuple[list[int], str | None]]:
        found = []
        for asker in self.askers:
            assert all(output.finish_reason is None for output in asker.outputs[:-1])
            found.append((asker.tokens, asker.outputs[-1].finish_reason))
        return found

    def check_outputs(self) -> None:
        for arrival, (tokens, reason) in zip(self.case.arrivals, self.outputs(), strict=True):
            expected = output_of(arrival.prompt, arrival.sampling)
            if reason == "abort":
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
                stopped = expected[-1] in arrival.sampling.stop_token_ids
                assert reason == ("stop" if stopped else "length")

    def check_messages(self) -> None:
        """Check that an observer can follow and finds no contradiction."""
        ledger, state = BlockLedger(), SessionState()
        snapshots = [reply for reply in self.desk.replies if isinstance(reply, wire.Snapshot)]
        version, next_step, tokens_ns = 0, 0, 0
        budget = {0: self.case.knobs.max_num_batched_tokens}
        for sequence, message in enumerate(self.sink.messages):
            state.apply(message)
            if isinstance(message, wire.KnobsChanged):
                assert message.effective_step == next_step
                version = message.version
                knobs = {"max_num_batched_tokens": budget[version - 1], **message.new}
                budget[version] = int(knobs["max_num_batched_tokens"])
            elif isinstance(message, wire.StepRecord):
                assert message.step == next_step
                next_step += 1
                assert message.knobs_version == version
                if message.token_limit is None:
                    assert message.token_budget == budget[version]
                self.check_times(message, tokens_ns)
                self.check_counts(message, state)
                tokens_ns = message.tokens_ns
            if isinstance(message, wire.StepRecord | wire.EngineStatus):
                if not ledger.is_open:
                    ledger.open_empty(message)
                assert ledger.apply(message) == []
            for snapshot in snapshots:
                if snapshot.sequence == sequence:
                    assert ledger.compare(snapshot) == []
                    self.check_snapshot(snapshot, state)
        assert not any(view.status != "finished" for view in state.requests.values())

    def check_times(self, record: wire.StepRecord, before_ns: int) -> None:
        times = [record.schedule_start_ns, record.schedule_end_ns, record.launch_ns]
        in_order = [before_ns, *times, record.tokens_ns]
        assert in_order == sorted(in_order)
        if record.hidden_ns is not None:
            assert record.hidden_ns > 0
            assert times == [before_ns] * 3
            assert record.num_wasted_tokens is not None

    def check_counts(self, record: wire.StepRecord, state: SessionState) -> None:
        statuses = [view.status for view in state.requests.values()]
        assert record.num_running == statuses.count("running")
        assert record.num_waiting == sum(each not in ("running", "finished") for each in statuses)
        first = {event.request_id for event in record.events if isinstance(event, wire.FirstToken)}
        assert first == {
            row.request_id for row in record.batch if row.flags & wire.RowFlag.FIRST_TOKEN
        }
        assert record.num_prefill_tokens + record.num_decode_tokens == sum(
            row.num_tokens for row in record.batch
        )
        assert record.num_decode_tokens == sum(
            row.num_tokens for row in record.batch if row.phase == wire.Phase.DECODE
        )

    def check_snapshot(self, snapshot: wire.Snapshot, state: SessionState) -> None:
        for view in snapshot.requests:
            told = state.requests[view.request_id]
            assert (view.status, view.num_output_tokens, view.num_blocks, view.held) == (
                told.status,
                told.num_output_tokens,
                told.num_blocks,
                told.held,
            )
            assert view.num_computed_tokens == told.num_computed_tokens


def passed(case: Case, *, overlap: bool = True) -> Run:
    """Run a case, and check what holds for every one."""
    run = Run(case, overlap=overlap)
    run.run()
    assert run.device.problems == []
    run.check_outputs()
    run.check_messages()
    return run


@pytest.fixture(scope="module")
def _without_logs() -> Iterator[None]:
    logging.getLogger("stepscope.engine").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("stepscope.engine").setLevel(logging.NOTSET)


@laws
@given(cases())
def test_with_overlap_every_request_gets_its_tokens_and_messages_are_consistent(case: Case) -> None:
    assert passed(case).scheduler.kv.counts().used == 0


@pytest.mark.usefixtures("_without_logs")
@settings(laws, max_examples=30)
@given(cases(), st.dictionaries(st.integers(0, 30), st.booleans(), min_size=1, max_size=3))
def test_a_failing_step_with_another_in_flight_ends_only_its_own_requests(
    case: Case, failures: dict[int, bool]
) -> None:
    case.failures = failures
    passed(case)


@pytest.mark.usefixtures("_without_logs")
@settings(laws, max_examples=30)
@given(cases(), st.sets(st.integers(0, 30), min_size=1, max_size=3))
def test_what_device_memory_cannot_hold_is_run_in_smaller_steps(
    case: Case, unfit: set[int]
) -> None:
    case.unfit = unfit
    for overlap in (True, False):
        run = passed(case, overlap=overlap)
        num_ended = sum(reason == "abort" for _, reason in run.outputs())
        assert num_ended <= len(unfit) + sum(a.abort_after is not None for a in case.arrivals)


def alike(
    turns: list[int], *, num_prompt: int = 12, stops: tuple[int, ...] = (), budget: int = 96
) -> Case:
    """Requests of one prompt, three blocks of four tokens long."""
    sampling = SamplingParams(max_tokens=10, stop_token_ids=stops)
    prompt = [1] * num_prompt
    return Case(
        4,
        60,
        Knobs(max_num_batched_tokens=budget, max_num_seqs=8),
        {},
        [Arrival(turn, prompt, sampling, 0, None) for turn in turns],
        set(),
        set(),
    )


@pytest.mark.parametrize("turn", range(12))
@pytest.mark.parametrize("num_others", [1, 2])
def test_a_block_freed_and_hit_in_the_same_step_has_one_owner_at_a_time(
    turn: int, num_others: int
) -> None:
    """The second request arrives in each step of the first's life, including the last."""
    stop = output_of([1] * 13, SamplingParams(max_tokens=10))[6]
    run = passed(alike([0] * num_others + [turn], num_prompt=13, stops=(stop,)))
    assert sum(record.num_wasted_tokens or 0 for record in run.records) > 0


def test_a_request_admitted_on_blocks_of_a_failing_step_is_recomputed() -> None:
    case = alike([0, 0], budget=12)
    case.failures = {0: False}
    run = passed(case)
    assert [reason for _, reason in run.outputs()] == ["abort", "length"]
    events = [each for m in run.sink.messages for each in getattr(m, "events", [])]
    assert sum(isinstance(each, wire.Preempted) for each in events) == 1


@pytest.mark.usefixtures("_without_logs")
def test_a_request_overtaken_in_a_step_without_memory_is_told_of_in_the_step_that_fits() -> None:
    case = alike([0, 1, 1])
    case.knobs = msgspec.structs.replace(case.knobs, max_num_seqs=1, policy="priority")
    first, overtaken, urgent = case.arrivals
    first.sampling = SamplingParams(max_tokens=3)
    overtaken.priority, urgent.priority = 1, -1
    case.snapshots, case.unfit = set(range(20)), {3}
    run = passed(case, overlap=False)
    assert [each.request_id for record in run.records for each in record.held or ()] == [1]


@pytest.mark.usefixtures("_without_logs")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_overtaken_in_a_step_that_fails_is_told_of_when_the_next_overtakes_it(
    overlap: bool,
) -> None:
    case = alike([0, 1, 1, 1])
    case.knobs = msgspec.structs.replace(case.knobs, max_num_seqs=1, policy="priority")
    first, overtaken, *urgent = case.arrivals
    first.sampling = SamplingParams(max_tokens=3)
    overtaken.priority = 1
    for each in urgent:
        each.priority = -1
    case.failures = {3: False}
    run = passed(case, overlap=overlap)
    assert [reason for _, reason in run.outputs()] == ["length", "length", "abort", "length"]
    assert [each.request_id for record in run.records for each in record.held or ()] == [1]
