"""The knobs (runtime settings) of a running vLLM.

An operator may change some of them, within bounds given by the values at vLLM's start.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.engine.adapters.attached.knob_values import changed
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.shapes import VllmScheduler
from stepscope.engine.protocol.settings.knobs import Limits, knob_specs
from stepscope.engine.protocol.wire import KnobSpec, KnobValue


class VllmKnobs(Struct, frozen=True, kw_only=True):
    """All settings that stepscope shows. `VllmKnobBoard.specs` lists the changeable ones."""

    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_token_threshold: int
    reserve: str
    watermark: float
    prefill_schedule_interval: int
    enable_chunked_prefill: bool
    policy: str
    enable_prefix_caching: bool

    def as_dict(self) -> dict[str, KnobValue]:
        return msgspec.structs.asdict(self)


class VllmKnobBoard:
    """Reads and sets the knobs of one scheduler. A change applies from its next `schedule()` on.

    Attributes:
        knobs: the current values.
        specs: the knobs that can change while this version of vLLM runs.
        limits: the values at start, which bound the knobs.
    """

    is_deferred = False

    def __init__(self, scheduler: VllmScheduler) -> None:
        self._scheduler = scheduler
        self._before: dict[tuple[int, str], tuple[Any, object]] = {}
        config, cache = scheduler.scheduler_config, scheduler.cache_config
        self.limits = Limits(
            max_num_batched_tokens=versions.token_budget(scheduler),
            max_num_seqs=scheduler.max_num_running_reqs,
            max_model_len=scheduler.max_model_len,
        )
        self.knobs = VllmKnobs(
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_num_seqs=versions.num_seats(scheduler),
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            reserve="prompt" if getattr(scheduler, versions.RESERVE, False) else "none",
            watermark=float(getattr(config, "watermark", 0.0)),
            prefill_schedule_interval=int(getattr(config, "prefill_schedule_interval", 1)),
            enable_chunked_prefill=bool(config.enable_chunked_prefill),
            policy=str(getattr(config.policy, "value", config.policy)),
            enable_prefix_caching=bool(cache.enable_prefix_caching),
        )
        self.specs = tuple(self._specs())

    def changed(self, changes: Mapping[str, KnobValue]) -> VllmKnobs:
        """Return the knobs with `changes` applied, without setting them.

        Raises:
            ConfigError: an unknown or fixed knob, a wrong type, a value outside its bounds.
        """
        return changed("vLLM", self.knobs, self.specs, changes)

    def set(self, knobs: VllmKnobs) -> None:
        """Set the knobs. Call it between two calls of `schedule()`.

        At its end, `schedule()` checks that it kept the token budget, so the budget may not change
        meanwhile.
        """
        scheduler, live = self._scheduler, {spec.name for spec in self.specs}
        self._put(scheduler, "max_num_scheduled_tokens", knobs.max_num_batched_tokens)
        self._put(
            scheduler.scheduler_config,
            "long_prefill_token_threshold",
            knobs.long_prefill_token_threshold,
        )
        if "max_num_seqs" in live:
            self._put(scheduler, versions.SEATS, knobs.max_num_seqs)
        if "reserve" in live:
            self._put(scheduler, versions.RESERVE, knobs.reserve == "prompt")
        if "watermark" in live:
            manager = scheduler.kv_cache_manager
            num_blocks = int(knobs.watermark * manager.block_pool.num_gpu_blocks)
            self._put(manager, versions.WATERMARK, num_blocks)
        if "prefill_schedule_interval" in live:
            self._put(scheduler, versions.CADENCE, knobs.prefill_schedule_interval)
        self.knobs = knobs

    def restore(self) -> None:
        """Restore the values that vLLM had before stepscope changed them."""
        for (_, name), (target, value) in self._before.items():
            setattr(target, name, value)
        self._before.clear()

    def _put(self, target: Any, name: str, value: object) -> None:
        before = getattr(target, name)
        if before != value:
            self._before.setdefault((id(target), name), (target, before))
            setattr(target, name, value)

    def _specs(self) -> list[KnobSpec]:
        scheduler, knobs, limits = self._scheduler, self.knobs, self.limits
        most = limits.max_num_batched_tokens
        # With less, vLLM would never schedule some prompts.
        least = 1 if knobs.enable_chunked_prefill else min(most, limits.max_model_len)
        if getattr(scheduler, "need_mamba_block_aligned_split", False):
            least = min(most, max(least, scheduler.block_size))
        # With several ranks that step together, their engine decides which steps take prefills.
        has_peers = scheduler.vllm_config.parallel_config.data_parallel_size > 1
        is_live = {
            "max_num_batched_tokens": True,
            "max_num_seqs": hasattr(scheduler, versions.SEATS),
            "long_prefill_token_threshold": True,
            "reserve": hasattr(scheduler, versions.RESERVE),
            "watermark": hasattr(scheduler.kv_cache_manager, versions.WATERMARK),
            "prefill_schedule_interval": hasattr(scheduler, versions.CADENCE) and not has_peers,
        }
        bounds: dict[str, dict[str, Any]] = {
            "max_num_batched_tokens": {"low": least},
            "reserve": {"choices": ("none", "prompt")},
        }
        return [
            msgspec.structs.replace(
                spec, default=getattr(knobs, spec.name), **bounds.get(spec.name, {})
            )
            for spec in knob_specs(limits)
            if is_live.get(spec.name)
        ]
