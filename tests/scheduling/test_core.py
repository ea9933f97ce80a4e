"""The engine's loop: failed steps, refused commands, and a start after a stop."""

import pytest

from stepscope.engine.protocol.commands import SetWorkload, Shutdown
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.wire import Aborted, Admitted, Arrived
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import SimulatedRunner
from tests.support.engines.cost_model import CostModel
from tests.support.engines.whole_core import WholeCore

LIMITS = Limits(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=256)
PROMPT = list(range(40))


@pytest.fixture
def engine() -> WholeCore:
    return WholeCore(LIMITS)


def test_a_step_record_says_how_many_messages_were_dropped_before_it(engine: WholeCore) -> None:
    engine.submit(PROMPT, max_tokens=3)
    for engine.sink.num_dropped in (0, 4, 9):
        assert engine.core.step()
    assert [record.num_dropped for record in engine.sink.records] == [0, 4, 9]


def test_a_failing_step_ends_its_requests_and_the_engine_keeps_running() -> None:
    class Failing(SimulatedRunner):
        fail = True

        def execute(self, step: ScheduledStep) -> StepResult:
            if self.fail:
                raise RuntimeError("out of memory")
            return super().execute(step)

    engine = WholeCore(LIMITS, Failing(CostModel()))
    victim = engine.submit(PROMPT, max_tokens=4)
    assert engine.core.step()
    assert victim.outputs[-1].finish_reason == "abort"
    engine.core.publish_heartbeat(idle=True)
    events = [event for each in engine.sink.messages for event in getattr(each, "events", [])]
    assert [type(event) for event in events] == [Arrived, Admitted, Aborted]
    engine.runner.fail = False
    next_one = engine.submit(PROMPT, max_tokens=4)
    engine.run()
    last = next_one.outputs[-1]
    assert last.finish_reason == "length"
    assert last.num_cached_tokens == 0, "blocks of the failed step hold nothing and were hit"


def test_an_engine_that_cannot_generate_load_refuses_a_workload(engine: WholeCore) -> None:
    client = engine.ask(SetWorkload(workload=WorkloadSpec(rate=2.0)))
    assert not engine.core.step()
    (reply,) = client.replies
    assert reply.code == "unsupported"
    assert [entry.code for entry in engine.core.audit.last()] == ["unsupported"]


def test_a_stopped_engine_can_be_run_again(engine: WholeCore) -> None:
    for _ in range(2):
        client = engine.submit(PROMPT, max_tokens=3)
        engine.ask(Shutdown())
        engine.core.run()
        assert client.outputs[-1].finish_reason == "abort"
        assert engine.sink.messages[-1].state == "stopped"
