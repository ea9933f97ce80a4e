"""The engine's loop: failed steps, refused commands, snapshots, and a start after a stop."""

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import SetWorkload, Shutdown, Submit
from stepscope.engine.protocol.replies import Error, Output
from stepscope.engine.protocol.settings.knobs import Limits
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import Aborted, Admitted, Arrived, EngineStatus, Finished
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.engine.simulation.step_time import CostModel
from tests.support.engines.core_ends import Client, Sink
from tests.support.engines.whole_core import WholeCore


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
