"""The knobs (runtime settings) of a running vLLM.

An operator may change some of them, within bounds given by the values at vLLM's start.
"""

from collections.abc import Mapping
from typing import Any

from stepscope.engine.adapters.attached.description import AttachedKnobs
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.versions import VllmScheduler
from stepscope.engine.protocol.settings.knobs import Limits
from stepscope.engine.protocol.wire import KnobValue


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
    most = limits.max_num_batched_tokens
    # With less, vLLM would never schedule some prompts.
    least = 1 if values["enable_chunked_prefill"] else min(most, limits.max_model_len)
    if getattr(scheduler, "need_mamba_block_aligned_split", False):
        least = min(most, max(least, scheduler.block_size))
    bounds: dict[str, dict[str, Any]] = {
        "max_num_batched_tokens": {"low": least},
        "reserve": {"choices": ("none", "prompt")},
    }
    owners = {name: live.owner_in(scheduler) for name, live in versions.LIVE.items()}
    if scheduler.vllm_config.parallel_config.data_parallel_size > 1:
        # Several ranks that step together: their engine decides which steps take prefills.
        del owners["prefill_schedule_interval"]
    attributes = {name: versions.LIVE[name].attribute for name in owners}
    theirs = {
        name: getattr(owner, attributes[name])
        for name, owner in owners.items()
        if hasattr(owner, attributes[name])
    }

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
            setattr(owners[name], attributes[name], their)

    live = {name: bounds.get(name, {}) for name in theirs}
    return AttachedKnobs("vLLM", limits, values, live, write)
