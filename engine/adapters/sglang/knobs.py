"""The knobs (runtime settings) of a running SGLang, and how they change on all of its ranks.

An operator may change some of them, up to the values at SGLang's start. Every tensor-parallel rank
has its own scheduler, and all must decide alike. So a change is broadcast by SGLang itself, as a
request among the others of the next loop iteration: each rank applies it before that batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from stepscope.engine.adapters.attached.description import AttachedKnobs
from stepscope.engine.adapters.sglang.shapes import SglangScheduler
from stepscope.engine.protocol.settings.knobs import Limits
from stepscope.engine.protocol.wire import KnobValue

CHUNK = "chunked_prefill_size"
SEATS = "pp_max_micro_batch_size"
LIVE = {"max_num_batched_tokens": CHUNK, "max_num_seqs": SEATS}
"""Knobs that can be changed while SGLang runs, and SGLang's names for them."""
_MARK = "stepscope"


def around_change(change: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Handle a request to change state, in place of SGLang's `Scheduler.set_internal_state`.

    A request of ours sets knobs on this rank. Any other request goes to SGLang's method, `change`.
    Returns SGLang's answer; None for our own requests, for which no client of SGLang waits.
    """
    values = request.server_args
    if _MARK not in values:
        return change(scheduler, request)
    if CHUNK in values:
        scheduler.chunked_prefill_size = int(values[CHUNK])
    if SEATS in values:
        change(scheduler, type(request)(server_args={SEATS: int(values[SEATS])}))
    return None


def knobs_of(scheduler: SglangScheduler, parallel: Any) -> tuple[AttachedKnobs, list[Any]]:
    """Return the knobs of a tensor-parallel group, and where requests to change them wait.

    They are to be sent to all ranks, in order. Raises ImportError: this SGLang has no
    `SetInternalStateReq`.
    """
    from sglang.srt.managers.io_struct import SetInternalStateReq

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
    to_send: list[Any] = []

    def write(changed: Mapping[str, KnobValue]) -> None:
        theirs = {LIVE[name]: value for name, value in changed.items()}
        to_send.append(SetInternalStateReq(server_args={_MARK: 1, **theirs}))

    # With the smallest chunk, every prompt makes progress. Prefill chunks end at page boundaries,
    # and decodes of mixed batches use part of the chunk.
    least = max(scheduler.page_size, scheduler.truncation_align_size or 1)
    if scheduler.is_mixed_chunk:
        least += limits.max_num_seqs
    bounds = {"max_num_seqs": (1, limits.max_num_seqs)}
    if chunk is not None:
        bounds["max_num_batched_tokens"] = least, chunk
    # The skipper drops requests that a rank adds to a loop iteration. Another node, without our
    # plugin, would ignore the request and decide differently.
    if scheduler.recv_skipper is not None or scheduler.server_args.nnodes > 1:
        bounds = {}
    live = {n: {"low": low, "high": high} for n, (low, high) in bounds.items() if low <= high}
    return AttachedKnobs("SGLang", limits, values, live, write, is_deferred=True), to_send
