"""`SimulatedSetup`: the settings of a simulated engine, except its seed and its requests."""

import hashlib

import msgspec
from msgspec import Struct

from stepscope.engine.protocol.settings.knobs import Knobs, Limits, knob_specs
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.simulation.simulated import START_NS, WALL_START_NS
from stepscope.engine.simulation.step_time import StepTimeModel


class SimulatedSetup(Struct, frozen=True, kw_only=True):
    """The settings of each simulated engine (replica) of a cluster."""

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
        """Make the `EngineInfo` of an engine; its clocks are virtual."""
        return EngineInfo(
            engine_id=self._engine_id(seed),
            name=self.device,
            software_version="simulated",
            simulated=self.simulated,
            model=self.model_name,
            attention_backend="none",
            device=self.device,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_model_len=self.limits.max_model_len,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_num_seqs=self.limits.max_num_seqs,
            knobs=knob_specs(self.limits),
            monotonic_ns=START_NS,
            wall_ns=WALL_START_NS,
            overlap=self.overlap or None,
            slo_ttft_ms=self.slo_ttft_ms,
            slo_itl_ms=self.slo_itl_ms,
        )

    def _engine_id(self, seed: int) -> str:
        """Return an engine id that is equal only for runs with equal settings and seed."""
        parts = [
            self.simulated, self.model_name, self.knobs, self.limits, self.num_blocks,
            self.block_size, self.overlap, self.work, seed,
        ]  # fmt: skip
        return f"simulated-{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:12]}"
