"""`SimulatedSession`: an engine on a virtual clock that publishes every step, like a real engine.

It has the core, scheduler and telemetry of a real engine. A `Replica` with the same seed has the
same steps and times, but publishes no messages. `run_requests` sends requests to either.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.loop.outlet import TelemetrySink
from stepscope.engine.protocol.commands import SetKnobs, Submit
from stepscope.engine.protocol.knobs import Knobs, Limits, knob_specs
from stepscope.engine.protocol.wire import EngineInfo, Snapshot
from stepscope.engine.scheduling.kv_cache import KVCacheManager, PrefixHashes
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.simulation.replica import Replica
from stepscope.engine.simulation.simulated import START_NS, WALL_START_NS, SimulatedRunner
from stepscope.engine.simulation.step_time import StepTimeModel
from stepscope.engine.simulation.virtual_requests import (
    BlockNames,
    DrawnStepTimes,
    SimulatedRequest,
)


class SimulatedSetup(Struct, frozen=True, kw_only=True):
    model: StepTimeModel
    simulated: str  # the model of step times, in a few words
    model_name: str
    device: str
    knobs: Knobs
    limits: Limits
    num_blocks: int
    block_size: int
    overlap: bool = False  # whether a step is scheduled while the one before it runs
    work: str = ""  # name of the work it gets; part of its engine id
    slo_ttft_ms: float | None = None  # service levels, in its description
    slo_itl_ms: float | None = None

    def scheduler(self) -> Scheduler:
        """Make a new scheduler, with an empty KV cache. Raises ConfigError if it does not fit."""
        self.knobs.check(self.limits)
        kv = KVCacheManager(self.num_blocks, self.block_size)
        return Scheduler(kv, self.knobs, self.limits)

    def info(self, seed: int) -> EngineInfo:
        # Its id is equal only for runs with equal settings and seed.
        parts = [
            self.simulated, self.model_name, self.knobs, self.limits, self.num_blocks,
            self.block_size, self.overlap, self.work, seed,
        ]  # fmt: skip
        return EngineInfo(
            engine_id=f"simulated-{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:12]}",
            name=self.device,
            software_version="simulated",
            simulated=self.simulated,
            model=self.model_name,
            attention_backend="none",
            device=self.device,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            **msgspec.structs.asdict(self.limits),
            knobs=knob_specs(self.limits),
            monotonic_ns=START_NS,
            wall_ns=WALL_START_NS,
            overlap=self.overlap or None,
            slo_ttft_ms=self.slo_ttft_ms,
            slo_itl_ms=self.slo_itl_ms,
        )


_SALT = b"simulated"  # constant, so that equal runs have equal recordings; nothing is secret
_WHO = "the recording"  # the client's name for changes of knobs that are repeated


class SimulatedSession:
    """An engine that publishes its steps, with the methods that `Replica` describes."""

    def __init__(self, setup: SimulatedSetup, seed: int, sink: TelemetrySink) -> None:
        self._runner = SimulatedRunner(DrawnStepTimes(setup.model, seed), seed)
        scheduler = setup.scheduler()
        scheduler.prefix_hashes = PrefixHashes(scheduler.kv, _SALT)
        scheduler.kv.judge_prompts(self._runner.clock)
        self._core = EngineCore(
            setup.info(seed), self._runner, scheduler, sink, overlap=setup.overlap
        )
        self._names = BlockNames(setup.block_size)
        self._client = SilentClient()

    @property
    def num_unfinished(self) -> int:
        return len(self._core.scheduler.requests)

    @property
    def now_ns(self) -> int:
        return self._runner.clock() - START_NS

    def snapshot(self) -> Snapshot:
        return self._core.snapshot()

    def submit(self, wanted: SimulatedRequest) -> None:
        self._wait_until(wanted.arrival_ns)
        token_ids = [0] * wanted.num_prompt_tokens
        submit = Submit(
            client_id=wanted.name,
            prompt_token_ids=token_ids,
            sampling=wanted.sampling,
            priority=wanted.priority,
        )
        call = Call(submit, self._client, token_ids, arrival_ns=START_NS + wanted.arrival_ns)
        self._core.client_requests.add(call, submit, self._names.of(wanted))

    def set_knobs(self, knobs: Knobs, time_ns: int) -> None:
        self._wait_until(time_ns)
        before = self._core.scheduler.knobs.as_dict()
        changes = {name: value for name, value in knobs.as_dict().items() if value != before[name]}
        if changes:
            self._core.inbox.put(Call(SetKnobs(changes=changes, who=_WHO), self._client))

    def run_until(self, time_ns: int) -> None:
        while self.now_ns < time_ns and self._step():
            pass

    def run_to_end(self) -> None:
        while self._step():
            pass
        self._core.publish_heartbeat(idle=True)

    def _step(self) -> bool:
        core = self._core
        has_run = core.step()
        # Publish no heartbeat while a step is in flight: it would have to finish that step first.
        if has_run and not core.has_step_in_flight:
            core.publish_heartbeat(idle=False)
        return has_run

    def _wait_until(self, time_ns: int) -> None:
        if not self._core.scheduler.has_work():
            self._core.publish_heartbeat(idle=True)
        self._runner.advance_to(START_NS + time_ns)


class TimedKnobs(NamedTuple):
    time_ns: int
    knobs: Knobs


def run_requests(
    engine: Replica | SimulatedSession,
    requests: Iterable[SimulatedRequest],
    *,
    changes: Sequence[TimedKnobs] = (),
    on_request: Callable[[int], bool] = lambda number: False,
) -> bool:
    """Send each request to an engine at its arrival, and run the engine until it is done.

    Args:
        requests: in the order of their arrivals.
        changes: in the order of their times.
        on_request: called with the number of each request before it arrives; True ends the run.

    Returns:
        Whether `on_request` ended the run early.
    """
    upcoming = list(reversed(changes))
    for number, request in enumerate(requests):
        if on_request(number):
            return True
        while upcoming and upcoming[-1].time_ns <= request.arrival_ns:
            _change(engine, upcoming.pop())
        engine.run_until(request.arrival_ns)
        engine.submit(request)
    while upcoming:
        _change(engine, upcoming.pop())
    engine.run_to_end()
    return False


def _change(engine: Replica | SimulatedSession, change: TimedKnobs) -> None:
    engine.run_until(change.time_ns)
    engine.set_knobs(change.knobs, change.time_ns)
