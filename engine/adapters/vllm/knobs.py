"""The knobs (runtime settings) of a running vLLM.

An operator may change some of them, within bounds given by the values at vLLM's start.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from stepscope.engine.adapters.attached.description import AttachedKnobs
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.versions import VllmScheduler
from stepscope.engine.protocol.settings.knobs import Limits, knob_specs
from stepscope.engine.protocol.wire import KnobSpec, KnobValue


def knobs_of(scheduler: VllmScheduler) -> AttachedKnobs:
    """Return the knobs of a scheduler. A change applies from its next `schedule()` on.

    At its end, `schedule()` checks that it kept the token budget, so write knobs between two calls.
    """
    config, cache = scheduler.scheduler_config, scheduler.cache_config
    limits = Limits(
        max_num_batched_tokens=versions.token_budget(scheduler),
        max_num_seqs=scheduler.max_num_running_reqs,
        max_model_len=scheduler.max_model_len,
    )
    values: dict[str, KnobValue] = {
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": versions.num_seats(scheduler),
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "reserve": "prompt" if getattr(scheduler, versions.RESERVE) else "none",
        "watermark": float(getattr(config, "watermark", 0.0)),
        "prefill_schedule_interval": int(getattr(config, "prefill_schedule_interval", 1)),
        "enable_chunked_prefill": bool(config.enable_chunked_prefill),
        "policy": str(getattr(config.policy, "value", config.policy)),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
    }
    specs = list(_specs(scheduler, values, limits))
    live = {spec.name: versions.LIVE[spec.name] for spec in specs}
    theirs = {name: getattr(at.owner_in(scheduler), at.attribute) for name, at in live.items()}

    def write(changed: Mapping[str, KnobValue]) -> None:
        for name, value in changed.items():
            their: object = value
            if value == values[name]:
                their = theirs[name]
            elif name == "reserve":
                their = value == "prompt"
            elif name == "watermark":
                pool = scheduler.kv_cache_manager.block_pool
                their = int(float(value) * pool.num_gpu_blocks)
            setattr(live[name].owner_in(scheduler), live[name].attribute, their)

    return AttachedKnobs("vLLM", limits, values, specs, write)


def _specs(
    scheduler: VllmScheduler, values: Mapping[str, KnobValue], limits: Limits
) -> Iterator[KnobSpec]:
    most = limits.max_num_batched_tokens
    # With less, vLLM would never schedule some prompts.
    least = 1 if values["enable_chunked_prefill"] else min(most, limits.max_model_len)
    if getattr(scheduler, "need_mamba_block_aligned_split", False):
        least = min(most, max(least, scheduler.block_size))
    bounds: dict[str, dict[str, Any]] = {
        "max_num_batched_tokens": {"low": least},
        "reserve": {"choices": ("none", "prompt")},
    }
    # With several ranks that step together, their engine decides which steps take prefills.
    has_peers = scheduler.vllm_config.parallel_config.data_parallel_size > 1
    for spec in knob_specs(limits):
        live = versions.LIVE.get(spec.name)
        if live is None or not hasattr(live.owner_in(scheduler), live.attribute):
            continue
        if spec.name == "prefill_schedule_interval" and has_peers:
            continue
        changed = bounds.get(spec.name, {})
        yield msgspec.structs.replace(spec, default=values[spec.name], **changed)
