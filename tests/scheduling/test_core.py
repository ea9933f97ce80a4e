"""The engine's loop: a record for every step, failed steps included, and deterministic messages."""

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import SetWorkload, Shutdown, Submit
from stepscope.engine.protocol.replies import Error, Output
from stepscope.engine.protocol.settings.knobs import Limits
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import (
    Aborted,
    Admitted,
    Arrived,
    EngineStatus,
    Finished,
    FirstToken,
    Phase,
    Preempted,
    RowFlag,
    StepRecord,
    Telemetry,
)
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.engine.simulation.step_time import CostModel
from tests.support.engines.core_ends import Client, Sink
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.engines.whole_core import WholeCore

BUSY = SimulatedWorkload(rate=20.0, output_tokens=80)


def steps_of(messages: list[tuple[int, Telemetry]]) -> list[StepRecord]:
    return [message for _, message in messages if isinstance(message, StepRecord)]


def test_the_token_and_block_counts_of_step_records_add_up() -> None:
    steps = steps_of(simulate(num_steps=600, workload=BUSY, num_blocks=600))
    assert [record.step for record in steps] == list(range(600))
    for record in steps:
        assert record.batch is not None
        assert record.kv is not None
        by_phase = dict.fromkeys(Phase, 0)
        for row in record.batch:
            by_phase[Phase(row.phase)] += row.num_tokens
        assert record.num_decode_tokens == by_phase[Phase.DECODE]
        assert record.num_prefill_tokens == by_phase[Phase.PREFILL] + by_phase[Phase.RECOMPUTE]
        assert record.kv.used + record.kv.cached + record.kv.empty == 600
        assert record.schedule_start_ns <= (record.launch_ns or 0) < record.tokens_ns
    assert any(r.num_decode_tokens and r.num_prefill_tokens for r in steps), "no mixed step"


def test_block_moves_alone_give_the_kv_counts() -> None:
    messages = simulate(num_steps=500, workload=BUSY, num_blocks=600, max_model_len=8192)
    owners = dict.fromkeys(range(600), -2)
    for _, message in messages:
        if not isinstance(message, StepRecord | EngineStatus):
            continue
        for move in message.moves:
            owners[move.block_id] = move.owner
        assert message.kv is not None
        values = list(owners.values())
        assert values.count(-1) == message.kv.cached
        assert values.count(-2) == message.kv.empty


def test_every_finished_request_has_an_arrival_an_admission_and_one_first_token_event() -> None:
    messages = simulate(num_steps=1500, workload=BUSY, num_blocks=520)
    story: dict[int, list[str]] = {}
    for _, message in messages:
        for event in getattr(message, "events", []):
            story.setdefault(event.request_id, []).append(type(event).__name__)
    ended = [names for names in story.values() if names[-1] == "Finished"]
    assert len(ended) > 50
    for names in ended:
        assert names[:2] == ["Arrived", "Admitted"]
        assert names.count("FirstToken") == 1
        assert names.count("Admitted") == 1 + names.count("Preempted")
    assert any("Preempted" in names for names in story.values()), "the pool was to be tight"


def test_row_flags_mark_first_tokens_and_resumed_requests() -> None:
    steps = steps_of(simulate(num_steps=1500, workload=BUSY, num_blocks=520))
    preempted: set[int] = set()
    for record in steps:
        first = {e.request_id for e in record.events if isinstance(e, FirstToken)}
        flagged = {row.request_id for row in record.batch or [] if row.flags & RowFlag.FIRST_TOKEN}
        assert flagged == first
        for row in record.batch or []:
            if row.flags & RowFlag.RESUMED:
                assert row.request_id in preempted
                preempted.discard(row.request_id)
        preempted |= {e.request_id for e in record.events if isinstance(e, Preempted)}


def make_core(runner: SimulatedRunner) -> tuple[EngineCore, Sink]:
    limits = Limits(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=256)
    made = WholeCore(limits, runner, knobs={"max_num_batched_tokens": 512})
    return made.core, made.sink


def test_a_step_record_says_how_many_messages_were_dropped_before_it() -> None:
    core, sink = make_core(SimulatedRunner(CostModel()))
    core.inbox.put(Call(request(3), Client(), list(range(40))))
    for sink.num_dropped in (0, 4, 9):
        assert core.step()
    assert [record.num_dropped for record in sink.records] == [0, 4, 9]


def request(max_tokens: int) -> Submit:
    return Submit(
        client_id="a",
        prompt_token_ids=list(range(40)),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def test_a_failing_step_ends_its_requests_and_the_engine_keeps_running() -> None:
    class Failing(SimulatedRunner):
        fail = True

        def execute(self, step: ScheduledStep) -> StepResult:
            if self.fail:
                raise RuntimeError("out of memory")
            return super().execute(step)

    runner = Failing(CostModel())
    core, sink = make_core(runner)
    victim, next_one = Client(), Client()
    core.inbox.put(Call(request(4), victim, list(range(40))))
    assert core.step()
    assert isinstance(victim.replies[-1], Output)
    assert victim.replies[-1].finish_reason == "abort"
    core.publish_heartbeat(idle=True)
    events = [e for m in sink.messages for e in getattr(m, "events", [])]
    assert [type(e) for e in events] == [Arrived, Admitted, Aborted]
    runner.fail = False
    core.inbox.put(Call(request(4), next_one, list(range(40))))
    while core.step():
        pass
    last = next_one.replies[-1]
    assert isinstance(last, Output)
    assert last.finish_reason == "length"
    assert last.num_cached_tokens == 0, "blocks of the failed step hold nothing and were hit"
    core.scheduler.kv.check_integrity()


def test_without_telemetry_the_engine_still_serves() -> None:
    core, _ = make_core(SimulatedRunner(CostModel()))
    core.publish_to(None)
    listener = Client()
    core.inbox.put(Call(request(4), listener, list(range(40))))
    while core.step():
        pass
    assert [output.num_output_tokens for output in listener.outputs] == [1, 2, 3, 4]


def test_a_snapshot_contains_nothing_that_a_later_message_repeats() -> None:
    core, sink = make_core(SimulatedRunner(CostModel()))
    core.inbox.put(Call(request(3), Client(), list(range(40))))
    core.step()
    snapshot = core.snapshot()
    assert snapshot.sequence == sink.next_sequence - 1
    before = len(sink.messages)
    while core.step():
        pass
    later = [e for m in sink.messages[before:] for e in getattr(m, "events", [])]
    assert [type(e) for e in later] == [Finished]
    assert [view.num_output_tokens for view in snapshot.requests] == [1]


def test_an_engine_that_cannot_generate_load_refuses_a_workload() -> None:
    core, _ = make_core(SimulatedRunner(CostModel()))
    client = Client()
    core.inbox.put(Call(SetWorkload(workload=WorkloadSpec(rate=2.0)), client))
    assert not core.step()
    (reply,) = client.replies
    assert isinstance(reply, Error)
    assert reply.code == "unsupported"
    assert [entry.code for entry in core.audit.last()] == ["unsupported"]


def test_a_stopped_engine_can_be_run_again() -> None:
    core, sink = make_core(SimulatedRunner(CostModel()))
    for _ in range(2):
        client = Client()
        core.inbox.put(Call(request(3), client, list(range(40))))
        core.inbox.put(Call(Shutdown(), Client()))
        core.run()
        assert client.outputs[-1].finish_reason == "abort"
        status = sink.messages[-1]
        assert isinstance(status, EngineStatus)
        assert status.state == "stopped"
