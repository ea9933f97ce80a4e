"""How an autopilot moves the knobs of a simulated engine, and how it releases them."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import SetWorkload, Shutdown
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.wire import StepRecord, Telemetry
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.simulation.virtual_requests import DrawnStepTimes, SimulatedRequest
from stepscope.engine.simulation.virtual_session import SimulatedSession, SimulatedSetup
from stepscope.engine.telemetry.step_draft import StepDraft
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.autopilot.live_pilot import LivePilot, Moved
from stepscope.recordings.autopilot.pilot import BUDGET, SEATS, Autopilot, Load, Move
from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.latency import SLO
from tests.support.engines.cost_model import CostModel
from tests.support.screens.live_dashboard import dashboard, press
from tests.support.screens.screen_text import screen_text
from tests.support.waiting import until, wait_for

LIMITS = Limits(max_num_batched_tokens=4096, max_num_seqs=64, max_model_len=4096)
TICK_NS = 500_000_000
# A full step of 4,096 tokens takes 90 ms, of 1,024 tokens 28 ms.
COST = CostModel(floor_ms=8, token_us=20, context_ns=0, host_ms=0)


class Drive:
    """An autopilot of a simulated engine on a virtual clock, with one request after another."""

    def __init__(self, itl_ms: float, *, cost: CostModel = COST, seats: int = 64) -> None:
        knobs = Knobs(max_num_batched_tokens=4096, max_num_seqs=seats)
        self.setup = SimulatedSetup(
            model=DrawnStepTimes(cost, 0), simulated="a test", model_name="none",
            device="virtual", knobs=knobs, limits=LIMITS, num_blocks=8000, block_size=16,
        )  # fmt: skip
        self.next_sequence = self.num_dropped = 0
        self.steps: list[StepRecord] = []
        self.moves: list[tuple[int, Move]] = []
        self._knobs = knobs
        self._now_ns = 0
        self._session = SimulatedSession(self.setup, 0, self)
        self._pilot = Autopilot(itl_ms, self.setup.info(0).knobs, knobs.as_dict())

    def publish(self, message: Telemetry) -> None:
        self.next_sequence += 1
        if isinstance(message, StepDraft):
            self.steps.append(wire.decode(wire.encode(message)))
            self._pilot.apply_step(self.steps[-1])

    def run(self, seconds: float, *, per_s: float, prompt: int, output: int) -> list[Move]:
        """Return the moves of these seconds, in which requests arrive evenly."""
        num_moves = len(self.moves)
        gap_ns = round(1e9 / per_s)
        end_ns = self._now_ns + round(seconds * 1e9)
        next_ns = self._now_ns
        while self._now_ns < end_ns:
            tick_ns = min(end_ns, self._now_ns + TICK_NS)
            while next_ns < tick_ns:
                self._session.run_until(next_ns)
                self._session.submit(SimulatedRequest(next_ns, prompt, output))
                next_ns += gap_ns
            self._session.run_until(tick_ns)
            self._now_ns = tick_ns
            self._decide()
        return [move for _, move in self.moves[num_moves:]]

    def _decide(self) -> None:
        if self.steps and (move := self._pilot.decide(self.steps[-1].tokens_ns)) is not None:
            self.moves.append((self._now_ns, move))
            self._knobs = self._knobs.changed(move.changes, LIMITS)
            self._session.set_knobs(self._knobs, self._now_ns)
            self._pilot.apply_knobs(self._knobs.as_dict(), self.steps[-1].step + 1)

    def late_share(self, itl_ms: float, last: int) -> float:
        """The share of late ITLs in the last so many steps."""
        load = Load(round(itl_ms * 1e6))
        for step in self.steps[-last:]:
            load.add(step)
        return load.num_late / load.num_gaps

    @property
    def budget(self) -> int:
        return self._knobs.max_num_batched_tokens

    @property
    def seats(self) -> int:
        return self._knobs.max_num_seqs


LONG_PROMPTS = {"per_s": 8.0, "prompt": 3000, "output": 12}


def test_the_autopilots_budget_settles_where_the_itl_level_is_kept() -> None:
    drive = Drive(itl_ms=30)
    drive.run(20, **LONG_PROMPTS)
    settled = drive.budget
    assert 400 < settled < 1500  # 1,100 tokens take 30 ms
    drive.run(20, **LONG_PROMPTS)
    assert drive.late_share(30, last=500) < 0.05
    assert abs(drive.budget - settled) < 0.6 * settled


def test_an_itl_level_that_any_budget_keeps_leaves_the_budget_at_its_limit() -> None:
    easy = Drive(itl_ms=500)
    easy.run(15, **LONG_PROMPTS)
    assert easy.budget == 4096


def test_the_autopilot_answers_a_sudden_change_of_load_within_seconds() -> None:
    drive = Drive(itl_ms=30)
    drive.run(15, per_s=0.5, prompt=64, output=200)
    assert not drive.moves  # no step was near the budget
    drive.run(6, **LONG_PROMPTS)
    assert drive.budget < 2048
    drive.run(10, **LONG_PROMPTS)
    assert drive.late_share(30, last=300) < 0.05


@pytest.mark.parametrize("itl_ms", [12, 30])
def test_each_change_by_the_autopilot_is_bounded_worthwhile_and_explained(itl_ms: float) -> None:
    drive = Drive(itl_ms=itl_ms)
    drive.run(40, **LONG_PROMPTS)
    values = [4096, *(move.changes[BUDGET] for _, move in drive.moves)]
    for before, after in itertools.pairwise(values):
        assert 0.49 * before <= after <= 1.51 * before
        assert abs(after - before) >= 0.14 * before
    times_ns = [0, *(time_ns for time_ns, _ in drive.moves)]
    for place in range(1, len(values)):
        if values[place] > values[place - 1]:
            assert times_ns[place] - times_ns[place - 1] >= 2.5e9
    reasons = [move.reason for _, move in drive.moves]
    assert all("ms at" in reason or "late; no model yet" in reason for reason in reasons)
    assert "ms at" in reasons[-1]


def test_the_autopilot_lowers_max_num_seqs_if_even_the_least_budget_is_too_slow() -> None:
    # Decodes alone take too long: 8 ms and 1 ms each.
    drive = Drive(itl_ms=30, cost=CostModel(floor_ms=8, token_us=1000, context_ns=0, host_ms=0))
    drive.run(40, per_s=3.0, prompt=40, output=300)
    assert any(SEATS in move.changes for _, move in drive.moves)
    assert drive.seats < 30


# With a running engine

HOLD = ("--hold", "--slo-itl", "15ms")


def started(*arguments: str, **pipes: int | bool) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "stepscope.tui.cli", *arguments], **pipes)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Endpoint]:
    """A simulated H100 under long prompts, in a process of its own."""
    tmp_path.chmod(0o700)
    endpoint = Endpoint.parse(f"ipc://{tmp_path}/engine")
    options = ("--endpoint", endpoint.control, "--gpu", "h100", "--exit-with-stdin")
    process = started("simulated-engine", *options, stdin=subprocess.PIPE)
    wait_for((tmp_path / "engine").is_socket, "the engine listens")
    with ControlClient(endpoint, 30.0) as client:
        spec = WorkloadSpec(rate=8, document_share=0.5, chat_tokens=128, document_tokens=4000)
        assert isinstance(client.ask(SetWorkload(workload=spec, who="test")), Ack)
        yield endpoint
    process.stdin.close()
    process.wait(30)


def ticked(
    pilot: LivePilot, until: Callable[[], bool], what: str, moves: list[Moved] | None = None
) -> list[Moved]:
    """Tick until the condition holds; add the moves to `moves` and return them."""
    moves = [] if moves is None else moves

    def is_so() -> bool:
        if (moved := pilot.tick(time.monotonic())) is not None:
            moves.append(moved)
        return until()

    wait_for(is_so, what)
    return moves


def test_autopilot_knob_changes_are_leased_audited_and_reverted(engine: Endpoint) -> None:
    pilot = LivePilot(engine, 15, "test")
    moves = ticked(pilot, lambda: BUDGET in pilot.held, "a move")
    with ControlClient(engine, 30.0) as client:
        during = client.snapshot()
        assert during.leased.before == {BUDGET: 2048}
        assert during.knobs[BUDGET] == moves[-1].move.changes[BUDGET] != 2048
        assert pilot.close() == {BUDGET: 2048}
        after = client.snapshot()
        assert after.knobs[BUDGET] == 2048
        assert after.leased is None
        reasons = [entry.detail for entry in after.audit if BUDGET in (entry.new or {})]
    assert "ITL 15 ms" in reasons[0]
    assert "ended" in reasons[-1]


def test_in_shadow_mode_the_autopilot_changes_nothing(engine: Endpoint) -> None:
    pilot = LivePilot(engine, 15, "test", is_shadow=True)
    proposed: list[Moved] = []
    ticked(pilot, lambda: bool(proposed), "a proposal", proposed)
    assert proposed[0].step is None
    with ControlClient(engine, 30.0) as client:
        assert client.snapshot().knobs[BUDGET] == 2048
    assert pilot.close() == {}


def test_an_operators_change_of_the_knob_ends_the_autopilot(engine: Endpoint) -> None:
    pilot = LivePilot(engine, 15, "test")
    ticked(pilot, lambda: bool(pilot.held), "a move")
    with ControlClient(engine, 30.0) as client:
        client.set_knobs({BUDGET: 777}, "anna")
        ticked(pilot, lambda: pilot.ended is not None, "the end")
        assert pilot.ended == f"anna has set {BUDGET} to 777"
        assert pilot.close() == {}
        assert client.snapshot().knobs[BUDGET] == 777


def test_an_engine_that_ends_ends_the_autopilot(engine: Endpoint) -> None:
    pilot = LivePilot(engine, 15, "test")
    ticked(pilot, lambda: bool(pilot.held), "a move")
    with ControlClient(engine, 30.0) as client:
        client.ask(Shutdown(who="test"))
    ticked(pilot, lambda: pilot.ended is not None, "the end")
    pilot.close()


def test_a_second_autopilot_is_refused_and_a_killed_one_gives_back(engine: Endpoint) -> None:
    process = started("tune", engine.control, *HOLD, "--json", stdout=subprocess.PIPE, text=True)
    assert json.loads(process.stdout.readline())["kind"] == "move"
    with ControlClient(engine, 30.0) as client:
        assert client.snapshot().knobs[BUDGET] != 2048
        with pytest.raises(ValueError, match="already holds max_num_batched_tokens"):
            LivePilot(engine, 15, "test")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)

        def is_back() -> bool:
            time.sleep(0.2)  # a client may ask only so often
            return client.snapshot().knobs[BUDGET] == 2048

        wait_for(is_back, "the engine takes them back")


def test_ctrl_c_ends_the_autopilot_and_restores_the_knobs(engine: Endpoint) -> None:
    process = started("tune", engine.control, *HOLD, stdout=subprocess.PIPE, text=True)
    assert "holds 95 %" in process.stdout.readline()
    assert "max_num_batched_tokens 2048 -> " in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "given back: max_num_batched_tokens=2048" in said
    with ControlClient(engine, 30.0) as client:
        assert client.snapshot().knobs[BUDGET] == 2048


# In the dashboard


@pytest.fixture
def source(engine: Endpoint) -> Iterator[Subscriber]:
    subscriber = Subscriber(engine, History(SLO(itl_ms=15)))
    subscriber.start()
    wait_for(lambda: (subscriber.history.last_step or 0) > 5, "steps")
    yield subscriber
    subscriber.stop()


async def test_one_key_starts_and_ends_the_autopilot(source: Subscriber) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)):
        await press(app, "A")
        await until(lambda: "AUTOPILOT" in screen_text(app), lambda: screen_text(app))
        await until(lambda: source.history.state.knobs[BUDGET] != 2048, "a move")
        await press(app, "A")
        await until(lambda: "given back" in screen_text(app), lambda: screen_text(app))
        await until(lambda: "AUTOPILOT" not in screen_text(app), lambda: screen_text(app))
        assert source.history.state.knobs[BUDGET] == 2048


async def test_the_autopilot_key_ends_another_clients_lease(source: Subscriber) -> None:
    app = dashboard(source)
    with ControlClient(source.endpoint, 30.0) as client:
        async with app.run_test(size=(120, 40)):
            client.set_knobs({BUDGET: 500}, "night-shift", lease_s=30)
            await until(lambda: source.history.state.leased is not None, "the lease")
            await until(lambda: "AUTOPILOT" in screen_text(app), lambda: screen_text(app))
            await press(app, "A")
            await until(lambda: source.history.state.leased is None, "its end")
            assert client.snapshot().knobs[BUDGET] == 2048


async def test_leaving_the_dashboard_restores_the_autopilots_knobs(source: Subscriber) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)):
        await press(app, "A")
        await until(lambda: source.history.state.knobs[BUDGET] != 2048, "a move")
    app.close()
    wait_for(lambda: source.history.state.knobs[BUDGET] == 2048, "given back")
