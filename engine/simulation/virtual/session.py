"""`SimulatedSession`: an engine on a virtual clock that publishes every step, as a real one does.

The same core, scheduler and telemetry as in a real engine. A `Replica` with the same seed has the
same steps and times, without the messages.
"""

from stepscope.engine.loop import dispatch
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.loop.outlet import TelemetrySink
from stepscope.engine.protocol.commands import SetKnobs, Submit
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import Snapshot
from stepscope.engine.scheduling.prefix_hashes import PrefixHashes
from stepscope.engine.simulation.simulated import START_NS, SimulatedRunner
from stepscope.engine.simulation.virtual.drawn import DrawnStepTimes
from stepscope.engine.simulation.virtual.requests import BlockNames, SimulatedRequest
from stepscope.engine.simulation.virtual.setup import SimulatedSetup

_SALT = b"simulated"  # equal runs have equal recordings; nothing in them is secret
_WHO = "the recording"  # whose changes of knobs are repeated


class SimulatedSession:
    """Runs until a moment, or to its end; an `Engine` of a cluster.

    Args:
        sink: gets the messages.
    """

    def __init__(self, setup: SimulatedSetup, seed: int, sink: TelemetrySink) -> None:
        self._runner = SimulatedRunner(DrawnStepTimes(setup.model, seed), seed)
        scheduler = setup.scheduler()
        scheduler.prefix_hashes = PrefixHashes(scheduler.kv, _SALT)
        self._core = EngineCore(
            setup.info(seed),
            self._runner,
            scheduler,
            setup.limits,
            sink,
            dispatch,
            overlap=setup.overlap,
        )
        self._names = BlockNames(setup.block_size)
        self._client = SilentClient()

    @property
    def num_unfinished(self) -> int:
        return len(self._core.scheduler.requests)

    @property
    def now_ns(self) -> int:
        """Virtual time since the start."""
        return self._runner.clock() - START_NS

    def snapshot(self) -> Snapshot:
        """What a recording begins with."""
        return self._core.snapshot()

    def submit(self, wanted: SimulatedRequest) -> None:
        """As `Replica.submit`."""
        self._wait_until(wanted.arrival_ns)
        token_ids = [0] * wanted.num_prompt_tokens
        submit = Submit(
            client_id=wanted.name,
            prompt_token_ids=token_ids,
            sampling=wanted.sampling,
            priority=wanted.priority,
        )
        arrival_ns = START_NS + wanted.arrival_ns
        self._core.new_requests.add(
            submit,
            token_ids,
            self._client,
            arrival_ns=arrival_ns,
            block_hashes=self._names.of(wanted),
        )

    def set_knobs(self, knobs: Knobs, time_ns: int) -> None:
        """As `Replica.set_knobs`."""
        self._wait_until(time_ns)
        before = self._core.scheduler.knobs.as_dict()
        changes = {name: value for name, value in knobs.as_dict().items() if value != before[name]}
        if changes:
            self._core.inbox.put(Call(SetKnobs(changes=changes, who=_WHO), self._client))

    def run_until(self, time_ns: int) -> None:
        """Begin every step that begins before `time_ns`."""
        while self.now_ns < time_ns and self._step():
            pass

    def run_to_end(self) -> None:
        while self._step():
            pass
        self._core.publish_heartbeat(idle=True)

    def _step(self) -> bool:
        core = self._core
        has_run = core.step()
        # A heartbeat waits until no step runs ahead, which would cost time that is no model's.
        if has_run and not core.has_step_in_flight:
            core.publish_heartbeat(idle=False)
        return has_run

    def _wait_until(self, time_ns: int) -> None:
        if not self._core.scheduler.has_work():
            self._core.publish_heartbeat(idle=True)
        self._runner.advance_to(START_NS + time_ns)
