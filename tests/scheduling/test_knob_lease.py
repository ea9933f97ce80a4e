"""Leased knobs get their old values back when the client that changed them falls silent."""

import pytest

from stepscope.engine.loop.changes import KnobLease
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import Asker, SetKnobs
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.replies import Ack, AnyReply, Error
from stepscope.engine.protocol.wire import Audited, EngineStatus, KnobValue
from stepscope.engine.simulation.simulated import SimulatedRunner
from tests.support.engines.core_ends import Client
from tests.support.engines.cost_model import CostModel
from tests.support.engines.whole_core import WholeCore

LIMITS = Limits(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=256)
BUDGET, SEATS = "max_num_batched_tokens", "max_num_seqs"
PILOT = Asker("pilot")
LEASE_S = 5.0


class Engine(WholeCore):
    """Its steps take 10 ms."""

    def __init__(self, *, overlap: bool) -> None:
        runner = SimulatedRunner(CostModel(floor_ms=10, token_us=0, context_ns=0, host_ms=0))
        super().__init__(LIMITS, runner, knobs={"max_num_batched_tokens": 256}, overlap=overlap)
        self.core.lease = KnobLease(runner.clock)

    def set(self, lease_s: float | None, asker: Asker = PILOT, **changes: KnobValue) -> AnyReply:
        client = Client()
        command = SetKnobs(changes=changes, lease_s=lease_s, reason="a try")
        self.core.inbox.put(Call(command, client, asker=asker))
        self.core.step()
        (reply,) = client.replies
        return reply

    def run_for(self, seconds: float) -> None:
        """Run steps with one request after another."""
        end_ns = self.core.clock() + round(seconds * 1e9)
        while self.core.clock() < end_ns:
            if not self.core.scheduler.has_work():
                self.submit([1, 2, 3], max_tokens=200, ignore_eos=True)
            self.core.step()
            self.core.publish_heartbeat(idle=False)

    def wait(self, seconds: float) -> None:
        """Let time pass without a step."""
        self.runner.advance_to(self.core.clock() + round(seconds * 1e9))
        self.core.step()
        self.core.publish_heartbeat(idle=True)

    @property
    def knobs(self) -> tuple[KnobValue, KnobValue]:
        knobs = self.core.scheduler.knobs.as_dict()
        return knobs[BUDGET], knobs[SEATS]

    @property
    def audited(self) -> list[Audited]:
        return [message for message in self.sink.messages if isinstance(message, Audited)]


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(overlap=request.param)


def test_leased_knobs_are_restored_when_their_client_falls_silent(engine: Engine) -> None:
    engine.set(LEASE_S, max_num_batched_tokens=128)
    engine.set(LEASE_S, max_num_batched_tokens=64, max_num_seqs=4)
    engine.run_for(LEASE_S / 2)
    assert engine.knobs == (64, 4)
    engine.run_for(LEASE_S)
    assert engine.knobs == (256, 8)
    given_back = engine.audited[-1]
    assert given_back.new == {BUDGET: 256, SEATS: 8}
    assert given_back.who == PILOT.who
    assert "did not renew" in given_back.detail
    engine.run_for(2 * LEASE_S)
    assert engine.audited[-1] == given_back
    # In an idle engine, too.
    engine.set(LEASE_S, max_num_batched_tokens=64)
    engine.wait(LEASE_S + 1)
    assert engine.knobs == (256, 8)


def test_renewing_a_lease_keeps_its_knobs_and_is_not_audited(engine: Engine) -> None:
    engine.set(LEASE_S, max_num_batched_tokens=64)
    for _ in range(4):
        engine.run_for(LEASE_S / 2)
        assert isinstance(engine.set(LEASE_S, max_num_batched_tokens=64), Ack)
    assert engine.knobs == (64, 8)
    assert [entry.new for entry in engine.audited] == [{BUDGET: 64}]
    assert engine.audited[0].detail == "a try"


def test_a_knob_change_without_a_lease_stays(engine: Engine) -> None:
    engine.set(LEASE_S, max_num_batched_tokens=64, max_num_seqs=4)
    engine.set(None, Asker("a person"), max_num_batched_tokens=100)
    engine.wait(LEASE_S + 1)
    assert engine.knobs == (100, 8)


def test_setting_a_leased_knob_even_to_its_value_ends_the_lease_and_is_audited(
    engine: Engine,
) -> None:
    engine.set(LEASE_S, max_num_batched_tokens=64)
    engine.set(LEASE_S, max_num_batched_tokens=256)
    engine.set(None, Asker("a person"), max_num_batched_tokens=256)
    assert engine.core.snapshot().leased is None
    assert engine.audited[-1].who == "a person"
    assert "pilot's lease of these knobs has ended" in engine.audited[-1].detail


def test_a_second_client_gets_no_lease_on_leased_knobs(engine: Engine) -> None:
    engine.set(LEASE_S, max_num_batched_tokens=64)
    reply = engine.set(LEASE_S, Asker("another"), max_num_batched_tokens=32)
    assert reply.code == "leased"
    assert "pilot" in reply.message
    assert engine.knobs == (64, 8)


def test_a_refused_knob_change_begins_no_lease(engine: Engine) -> None:
    reply = engine.set(LEASE_S, max_num_batched_tokens=100_000)
    assert isinstance(reply, Error)
    assert engine.core.lease.published() is None


def test_telemetry_says_which_client_leases_which_knobs(engine: Engine) -> None:
    engine.set(LEASE_S, max_num_batched_tokens=64)
    engine.wait(1.1)
    status = [each for each in engine.sink.messages if isinstance(each, EngineStatus)][-1]
    assert (status.leased.who, status.leased.before) == ("pilot", {BUDGET: 256})
    engine.wait(LEASE_S)
    assert engine.core.snapshot().leased is None
