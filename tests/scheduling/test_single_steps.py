"""Single steps: an engine that runs only steps asked for reports itself as paused."""

import pytest

from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import Command, Pause, Resume, StepOnce, Submit
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import EngineStatus
from stepscope.recordings.history.history import History
from stepscope.recordings.state.limits import LIMITS as LIMITS_OF_STEPS
from tests.support.engines.core_ends import Client
from tests.support.engines.whole_core import WholeCore

LIMITS = Limits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256)


class Engine(WholeCore):
    """Stepped as by its own loop."""

    def ask(self, command: Command) -> Client:
        client = super().ask(command)
        self.run()
        return client

    def serve(self, max_tokens: int) -> Client:
        client = self.submit([1, 2, 3], max_tokens=max_tokens)
        self.run()
        return client

    def run(self, most: int = 0) -> None:
        while self.core.step():
            self.core.publish_heartbeat(idle=False)
        self.core.publish_heartbeat(idle=True)

    @property
    def published_state(self) -> str:
        return [m for m in self.sink.messages if isinstance(m, EngineStatus)][-1].state


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(LIMITS, overlap=request.param)


def test_an_idle_engine_refuses_a_single_step_and_then_serves_normally(engine: Engine) -> None:
    (refused,) = engine.ask(StepOnce(n=1)).replies
    assert refused.message.startswith("there is nothing to run: ")
    assert engine.published_state == engine.core.snapshot().state == "idle"
    assert len(engine.serve(max_tokens=9).tokens) == 9
    assert engine.published_state == "idle"


def test_an_engine_stays_paused_however_many_single_steps_it_has_work_for(engine: Engine) -> None:
    engine.ask(Pause())
    engine.ask(StepOnce(n=1))
    assert engine.published_state == engine.core.snapshot().state == "paused"
    client = engine.serve(max_tokens=9)
    assert len(client.tokens) == 1
    assert engine.published_state == engine.core.snapshot().state == "paused"
    engine.ask(StepOnce(n=12))
    assert len(client.tokens) == 9
    assert engine.published_state == engine.core.snapshot().state == "paused"
    client = engine.serve(max_tokens=9)  # gets the steps that are left
    assert len(client.tokens) == 4
    assert engine.published_state == "paused"
    engine.ask(Resume())
    assert len(client.tokens) == 9
    assert engine.published_state == "idle"


def test_a_running_engine_reports_itself_paused_after_a_single_step(engine: Engine) -> None:
    client = Client()
    engine.core.inbox.put(Call(Submit(sampling=SamplingParams(max_tokens=50)), client, [1, 2, 3]))
    engine.core.step()
    engine.core.publish_heartbeat(idle=False)
    assert engine.core.state == "running"
    engine.ask(StepOnce(n=1))
    assert engine.published_state == "paused"
    assert len(client.tokens) < 50


def test_only_steps_held_back_by_the_operator_count_as_limited_by_a_pause(engine: Engine) -> None:
    engine.serve(max_tokens=4)  # step 0 to 3
    engine.ask(Pause())
    engine.serve(max_tokens=6)
    for _ in range(2):  # step 4 and 5
        wait_a_minute(engine)
        engine.ask(StepOnce(n=1))
    wait_a_minute(engine)
    engine.ask(Resume())  # step 6 to 9
    history = History()
    for sequence, message in enumerate(engine.sink.messages):
        history.append(sequence, message)
    limits = [history.summary(step).limit for step in range(10)]  # type: ignore[union-attr]
    held_back = [step for step, limit in enumerate(limits) if LIMITS_OF_STEPS[limit] == "paused"]
    assert held_back == [4, 5, 6]


def wait_a_minute(engine: Engine) -> None:
    engine.runner.advance_to(engine.runner.clock() + 60_000_000_000)
