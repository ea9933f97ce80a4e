"""Attaches to a scheduler of SGLang by wrapping its methods; describes it, and its knobs.

The wrappers run on the scheduler's thread.

An operator may change some knobs (runtime settings), up to the values at SGLang's start. Every
tensor-parallel rank has its own scheduler, and all must decide alike. So a change is broadcast by
SGLang itself, as a request among the others of the next loop iteration: each rank applies it before
that batch.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from time import monotonic_ns
from typing import Any

import msgspec

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.adapters.attached.description import (
    AttachedKnobs,
    described,
    known,
    rank_endpoint,
)
from stepscope.engine.adapters.attached.hooks import Hooks
from stepscope.engine.adapters.sglang import shapes
from stepscope.engine.adapters.sglang.shapes import SglangBatch, SglangReq, SglangScheduler
from stepscope.engine.adapters.sglang.watcher import SglangWatcher
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.wire import EngineInfo, KnobValue
from stepscope.engine.transport.endpoints import Endpoint

CHUNK = "chunked_prefill_size"
SEATS = "pp_max_micro_batch_size"
LIVE = {"max_num_batched_tokens": CHUNK, "max_num_seqs": SEATS}
"""Knobs that can be changed while SGLang runs, and SGLang's names for them."""
_MARK = "stepscope"


def describe(
    scheduler: SglangScheduler, parallel: Any, knobs: AttachedKnobs, endpoint: Endpoint
) -> EngineInfo:
    """Return the engine's description. Values that this version of SGLang lacks are None."""
    args, model = scheduler.server_args, scheduler.model_config
    release = known(lambda: version("sglang"))
    rank, size = data_parallel(parallel)
    return msgspec.structs.replace(
        described("sglang", endpoint, knobs),
        model=str(getattr(args, "served_model_name", None) or args.model_path),
        architecture=known(lambda: str(model.hf_config.architectures[0])),
        dtype=known(lambda: str(model.dtype).removeprefix("torch.")),
        device=known(lambda: str(args.device)),
        implementation=f"SGLang {release or ''}".strip(),
        attention_backend=known(lambda: str(args.attention_backend)),
        num_layers=known(lambda: int(model.num_hidden_layers)),
        num_kv_heads=known(lambda: int(model.num_key_value_heads)),
        head_dim=known(lambda: int(model.head_dim)),
        block_size=scheduler.page_size,
        overlap=scheduler.enable_overlap,
        engine_version=release,
        data_parallel_rank=rank if size > 1 else None,
        data_parallel_size=size,
        tensor_parallel_size=known(lambda: int(parallel.tp_size)),
    )


def data_parallel(parallel: Any) -> tuple[int, int]:
    """Return this data-parallel rank and the number of ranks.

    There are as many as replicas, times the groups of data-parallel attention in each.
    """
    groups = parallel.attn_dp_size
    rank = (parallel.dp_rank or 0) * groups + parallel.attn_dp_rank
    return rank, parallel.dp_size * groups


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

    They are to be sent to all ranks, in order.
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


def attach(scheduler: Any, endpoint: str) -> Attachment | None:
    """Watch a scheduler whose event loop is about to run on this thread.

    Returns None on a rank that repeats the decisions of the first of its tensor-parallel group.

    `endpoint`: as in STEPSCOPE_ENDPOINT; `rank_endpoint` derives that of this data-parallel rank.

    Raises:
        Exception: the scheduler cannot be watched, or the endpoint is not available. The scheduler
            is then unchanged.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if not shapes.is_first_rank(parallel):
        return None
    shapes.check(scheduler, parallel)
    knobs, to_send = knobs_of(scheduler, parallel)
    watcher = SglangWatcher(scheduler, parallel)
    at = rank_endpoint(endpoint, *data_parallel(parallel))
    log, info = logging.getLogger("sglang.stepscope"), describe(scheduler, parallel, knobs, at)
    hook = partial(_hook, scheduler, watcher, to_send)
    return Attachment("SGLang", log, at, info, watcher, knobs, hook)


def _hook(
    scheduler: SglangScheduler, watcher: SglangWatcher, to_send: list[Any], attachment: Attachment
) -> None:
    """Wrap the methods of one scheduler, so that they report to the watcher."""
    pool, publisher = watcher.pool, attachment.publisher

    def scheduled(start_ns: int, plan: shapes.SglangPlan, *args: Any, **kwargs: Any) -> None:
        watcher.scheduled(plan, start_ns, monotonic_ns())

    def launched(start_ns: int, result: Any, batch: SglangBatch, *args: Any, **kwargs: Any) -> None:
        watcher.launched(batch, start_ns)

    def processed(start_ns: int, result: Any, batch: SglangBatch, *args: Any, **kw: Any) -> None:
        record = watcher.processed(batch, attachment.seen(), publisher.num_dropped)
        if record is not None:
            publisher.publish(record)

    def evicted(before: int, result: Any, *args: Any, **kwargs: Any) -> None:
        pool.evicted(before, result.num_tokens_evicted)

    # SGLang may reject the request within the method, so note its arrival first.
    def around_queue(add: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_add_request_to_queue(req: SglangReq, *args: Any, **kwargs: Any) -> Any:
            is_retracted = bool(kwargs.get("is_retracted"))
            attachment.note(lambda: watcher.queued(req, is_retracted))
            return add(req, *args, **kwargs)

        return stepscope_add_request_to_queue

    def around_abort(send: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_send_abort_output(request: Any, req: SglangReq, *args: Any, **kw: Any) -> Any:
            attachment.note(lambda: watcher.aborted(req))
            return send(request, req, *args, **kw)

        return stepscope_send_abort_output

    around, wrap = attachment.around, attachment.hooks.wrap
    wrap(scheduler, "get_next_batch_to_run", lambda method: around(method, scheduled))
    wrap(scheduler, "run_batch", lambda method: around(method, launched))
    wrap(scheduler, "process_batch_result", lambda method: around(method, processed))
    wrap(scheduler, "_add_request_to_queue", around_queue)
    wrap(scheduler, "send_abort_output", around_abort)
    cache, before_eviction = scheduler.tree_cache, lambda: pool.num_evicted_tokens
    for name in ("evict", "evict_for_alloc"):
        wrap(cache, name, lambda method: around(method, evicted, before_eviction))

    # Removed last: one more loop iteration must send SGLang's own values to the other ranks.
    turns = Hooks()

    def tend() -> None:
        attachment.tend_if_due()
        attachment.core.apply_deferred()

    def around_turn(poll: Callable[..., Any]) -> Callable[..., Any]:
        """Apply commands, and add our requests to change knobs to the result.

        SGLang's first rank adds the result of `_poll_timeout_aborts` to the loop's requests.
        """

        def stepscope_poll_timeout_aborts(*args: Any, **kwargs: Any) -> Any:
            theirs = poll(*args, **kwargs)
            attachment.note(tend)
            with attachment.lock:
                if not attachment.is_attached:
                    turns.restore()
                ours, to_send[:] = to_send[:], []
                return [*theirs, *ours]

        return stepscope_poll_timeout_aborts

    turns.wrap(scheduler, "_poll_timeout_aborts", around_turn)
