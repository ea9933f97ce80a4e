"""The knobs (runtime settings) of a running SGLang.

An operator may change some of them, up to the values at SGLang's start.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from stepscope.engine.adapters.attached.attached_knobs import AttachedKnobs
from stepscope.engine.adapters.sglang.broadcast import LIVE, KnobRequests
from stepscope.engine.adapters.sglang.shapes import SglangScheduler
from stepscope.engine.protocol.settings.knobs import Limits, knob_specs
from stepscope.engine.protocol.wire import KnobSpec, KnobValue


def knobs_of(scheduler: SglangScheduler, parallel: Any) -> tuple[AttachedKnobs, KnobRequests]:
    """Return the knobs of a tensor-parallel group, and the requests that change them on all ranks.

    Args:
        parallel: SGLang's parallel context, which has the limit on running requests.
    """
    chunk = scheduler.chunked_prefill_size
    limits = Limits(
        max_num_batched_tokens=chunk or scheduler.max_prefill_tokens,
        max_num_seqs=min(parallel.pp_max_micro_batch_size, scheduler.max_running_requests),
        max_model_len=scheduler.model_config.context_len,
    )
    values: dict[str, KnobValue] = {
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "max_prefill_tokens": scheduler.max_prefill_tokens,
        "enable_chunked_prefill": chunk is not None,
        "enable_mixed_chunk": scheduler.is_mixed_chunk,
        "policy": str(scheduler.schedule_policy),
        "enable_prefix_caching": not scheduler.disable_radix_cache,
    }
    requests = KnobRequests(values)
    specs = list(_specs(scheduler, limits))
    return AttachedKnobs("SGLang", limits, values, specs, requests, is_deferred=True), requests


def _specs(scheduler: SglangScheduler, limits: Limits) -> Iterator[KnobSpec]:
    if scheduler.recv_skipper is not None:
        return  # the skipper drops requests that a rank adds to a loop iteration
    if scheduler.server_args.nnodes > 1:
        return  # a node without our plugin would ignore the request and decide differently
    # With the smallest chunk, every prompt makes progress. Prefill chunks end at page boundaries,
    # and decodes of mixed batches use part of the chunk.
    least = max(scheduler.page_size, scheduler.truncation_align_size or 1)
    if scheduler.is_mixed_chunk:
        least += limits.max_num_seqs
    lows = {"max_num_batched_tokens": least, "max_num_seqs": 1}
    for spec in knob_specs(limits):
        if spec.name not in LIVE:
            continue
        low, high = lows[spec.name], getattr(limits, spec.name)
        is_fixed = spec.name == "max_num_batched_tokens" and scheduler.chunked_prefill_size is None
        if low <= high and not is_fixed:
            yield msgspec.structs.replace(spec, default=high, low=low, high=high)
