"""`serve_simulated`: serves a simulated engine, with the sockets of a real one.

Its steps take real time, or a fraction of it. The real scheduler also takes time, which must not
count as virtual time. So after a step the virtual clock stops until the next step begins, for at
most `_SETTLE_NS`. After that the engine counts as idle, and the clock continues.
"""

import os
import time
from collections.abc import Callable

import msgspec

from stepscope.engine.control.intake import Intake
from stepscope.engine.control.server import ControlServer
from stepscope.engine.loop.audit import ControlTally
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Inbox
from stepscope.engine.loop.pipeline import Unlaunched
from stepscope.engine.process.serve import stop_signals, workload_submit
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.scheduling.kv_memory import memory_bytes
from stepscope.engine.scheduling.step import InFlight, ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import START_NS, VOCAB_SIZE, SimulatedRunner
from stepscope.engine.simulation.step_time import StepTimeModel
from stepscope.engine.simulation.virtual_requests import (
    CHARS_PER_TOKEN,
    DrawnStepTimes,
    MadeUpCodec,
)
from stepscope.engine.simulation.virtual_session import SimulatedSetup
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from stepscope.engine.transport.gate import gate_of
from stepscope.engine.workload.load import WorkloadDriver

_SETTLE_NS = 20_000_000  # in real time


class PacedRunner:
    """A `Runner` that sleeps while a step runs, `speed` virtual seconds in a real one."""

    def __init__(self, model: StepTimeModel, seed: int, speed: float) -> None:
        self._runner = SimulatedRunner(model, seed)
        self._speed = speed
        self._anchor = START_NS, time.monotonic_ns()  # virtual and real time of one instant
        self._end_ns = START_NS  # virtual end of the running step, or of the last one
        self._ended_wall_ns: int | None = 0  # real end of the last step; None while one runs

    def clock(self) -> int:
        wall_ns = time.monotonic_ns()
        ended_wall_ns, end_ns = self._ended_wall_ns, self._end_ns
        if ended_wall_ns is None:
            return min(self._virtual_ns(wall_ns), end_ns)
        if wall_ns - ended_wall_ns < _SETTLE_NS:
            return end_ns
        return max(self._virtual_ns(wall_ns), end_ns)

    def execute(self, step: ScheduledStep) -> StepResult:
        self._runner.advance_to(self.clock())
        result = self._runner.execute(step)
        self._end_ns, self._ended_wall_ns = result.tokens_ns, None
        begun_ns, begun_wall_ns = self._anchor
        due_ns = begun_wall_ns + round((result.tokens_ns - begun_ns) / self._speed)
        left_ns = due_ns - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        else:  # the host cannot keep up; do not run faster later to make up for it
            self._anchor = result.tokens_ns, time.monotonic_ns()
        self._ended_wall_ns = time.monotonic_ns()
        return result

    def launch(self, step: ScheduledStep) -> InFlight:
        return Unlaunched(self, step)

    def _virtual_ns(self, wall_ns: int) -> int:
        virtual_ns, begun_wall_ns = self._anchor
        return virtual_ns + round((wall_ns - begun_wall_ns) * self._speed)


_DEFAULTS = EngineConfig()


def serve_simulated(
    setup: SimulatedSetup,
    endpoint: Endpoint,
    speed: float,
    seed: int,
    ready: Callable[[EngineInfo], None],
) -> None:
    """Serve a simulated engine until Shutdown, SIGINT, SIGTERM or SIGHUP.

    `speed`: virtual seconds for each second of real time.

    Raises ConfigError: the address is not available, or the knobs do not go together.
    """
    runner = PacedRunner(DrawnStepTimes(setup.model, seed), seed, speed)
    scheduler, max_model_len = setup.scheduler(), setup.limits.max_model_len
    scheduler.kv.judge_prompts(runner.clock)
    intake = Intake(MadeUpCodec(), VOCAB_SIZE, max_model_len)
    inbox = Inbox()
    with gate_of("", endpoint) as gate, EndpointLock(endpoint, gate and gate.local, endpoint.name):
        replay_bytes = memory_bytes("replay_memory", _DEFAULTS.replay_memory)
        publisher = Publisher(endpoint.telemetry, _DEFAULTS.replay_steps, replay_bytes, gate)
        workload = WorkloadDriver(
            workload_submit(inbox, intake, runner.clock),
            chars_per_token=CHARS_PER_TOKEN,
            max_model_len=max_model_len,
            num_unfinished=lambda: len(scheduler.requests) + inbox.qsize(),
            speed=speed,
        )
        info = _info(setup, endpoint, seed)
        core = EngineCore(
            info, runner, scheduler, publisher,
            inbox=inbox, workload=workload, control_tally=ControlTally(gate),
        )  # fmt: skip
        control = ControlServer(endpoint.control, core, intake, None, publisher.replay, gate)
        control.start()
        try:
            with stop_signals(core):
                ready(info)
                core.run()
        finally:
            workload.set(None)
            control.close()
            publisher.close()


def _info(setup: SimulatedSetup, endpoint: Endpoint, seed: int) -> EngineInfo:
    return msgspec.structs.replace(
        setup.info(seed),
        engine_id=f"simulated-{os.getpid()}-{time.time_ns():x}",
        pid=os.getpid(),
        monotonic_ns=START_NS,
        wall_ns=time.time_ns(),
        chars_per_token=float(CHARS_PER_TOKEN),
        telemetry_endpoint=endpoint.telemetry,
        control_endpoint=endpoint.control,
        bundles=True,
        keeps_snapshots=True,
    )
