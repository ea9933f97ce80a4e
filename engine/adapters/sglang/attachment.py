"""Attaches to a scheduler of SGLang by wrapping its methods, and describes it (`EngineInfo`).

The wrappers run on the scheduler's thread.
"""

import logging
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from time import monotonic_ns
from typing import Any

import msgspec

from stepscope.engine.adapters.attached.attachment import AttachedEngine, Attachment
from stepscope.engine.adapters.attached.description import (
    AttachedKnobs,
    described,
    known,
    rank_endpoint,
)
from stepscope.engine.adapters.attached.hooks import Hooks
from stepscope.engine.adapters.sglang.knobs import KnobRequests, knobs_of
from stepscope.engine.adapters.sglang.shapes import (
    SglangBatch,
    SglangPlan,
    SglangReq,
    SglangScheduler,
    check,
    is_first_rank,
)
from stepscope.engine.adapters.sglang.watcher import SglangWatcher
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.transport.endpoints import Endpoint


def describe(
    scheduler: SglangScheduler, parallel: Any, knobs: AttachedKnobs, endpoint: Endpoint
) -> EngineInfo:
    """Return the engine's description. Values that this version of SGLang lacks are None.

    The number of blocks is None, because SGLang does not report single blocks.
    """
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


def endpoint_of(parallel: Any, text: str) -> Endpoint:
    """Return the endpoint of this data-parallel rank, as `rank_endpoint` derives it from `text`."""
    return rank_endpoint(text, *data_parallel(parallel))


def data_parallel(parallel: Any) -> tuple[int, int]:
    """Return this data-parallel rank and the number of ranks.

    The number of ranks is the number of replicas times the number of groups of data-parallel
    attention.
    """
    groups = parallel.attn_dp_size
    rank = (parallel.dp_rank or 0) * groups + parallel.attn_dp_rank
    return rank, parallel.dp_size * groups


def attach(scheduler: Any, endpoint: str) -> Attachment | None:
    """Watch a scheduler whose event loop is about to run on this thread.

    Args:
        endpoint: an endpoint as in STEPSCOPE_ENDPOINT.

    Returns:
        The attachment. None on a rank that only repeats the decisions of the first rank of its
        tensor-parallel group.

    Raises:
        Exception: the scheduler cannot be watched, or the endpoint is not available. The scheduler
            is then unchanged.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if not is_first_rank(parallel):
        return None
    check(scheduler, parallel)
    knobs, requests = knobs_of(scheduler, parallel)
    watcher = SglangWatcher(scheduler, parallel)
    at = endpoint_of(parallel, endpoint)
    return Attachment(
        AttachedEngine(
            "SGLang",
            logging.getLogger("sglang.stepscope"),
            at,
            describe(scheduler, parallel, knobs, at),
            watcher,
            knobs,
            _SglangHooks(scheduler, watcher, requests).hook,
        )
    )


class _SglangHooks:
    """Wraps the methods of one scheduler, so that they report to the watcher."""

    def __init__(
        self, scheduler: SglangScheduler, watcher: SglangWatcher, requests: KnobRequests
    ) -> None:
        self._scheduler = scheduler
        self._watcher = watcher
        self._requests = requests
        # Removed last: one more loop iteration must send SGLang's own values to the other ranks.
        self._turns = Hooks(scheduler)

    def hook(self, attachment: Attachment) -> None:
        """Wrap the scheduler's methods."""
        hooks = attachment.hooks_on(self._scheduler)
        wrap = {
            "get_next_batch_to_run": self._around_schedule,
            "run_batch": self._around_run,
            "process_batch_result": self._around_result,
            "_add_request_to_queue": self._before_queue,
            "send_abort_output": self._before_abort,
        }
        for name, around in wrap.items():
            hooks.wrap(name, partial(around, attachment))
        evictor = attachment.hooks_on(self._scheduler.tree_cache)
        evictor.wrap("evict", partial(self._around_evict, attachment))
        evictor.wrap("evict_for_alloc", partial(self._around_evict, attachment))
        self._turns.wrap("_poll_timeout_aborts", partial(self._around_turn, attachment))

    def _around_schedule(
        self, attachment: Attachment, schedule: Callable[..., SglangPlan]
    ) -> Callable[..., Any]:
        def stepscope_get_next_batch_to_run(*args: Any, **kwargs: Any) -> SglangPlan:
            start_ns = attachment.seen()
            plan = schedule(*args, **kwargs)
            end_ns = monotonic_ns()
            attachment.note(lambda: self._watcher.scheduled(plan, start_ns, end_ns))
            return plan

        return stepscope_get_next_batch_to_run

    def _around_run(self, attachment: Attachment, run: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_run_batch(batch: SglangBatch, *args: Any, **kwargs: Any) -> Any:
            launch_ns = attachment.seen()
            result = run(batch, *args, **kwargs)
            attachment.note(lambda: self._watcher.launched(batch, launch_ns))
            return result

        return stepscope_run_batch

    def _around_result(
        self, attachment: Attachment, process: Callable[..., Any]
    ) -> Callable[..., Any]:
        publisher = attachment.publisher

        def publish(batch: SglangBatch) -> None:
            record = self._watcher.processed(batch, attachment.seen(), publisher.num_dropped)
            if record is not None:
                publisher.publish(record)

        def stepscope_process_batch_result(batch: SglangBatch, *args: Any, **kwargs: Any) -> Any:
            attachment.seen()
            result = process(batch, *args, **kwargs)
            attachment.note(lambda: publish(batch))
            return result

        return stepscope_process_batch_result

    def _before_queue(self, attachment: Attachment, add: Callable[..., Any]) -> Callable[..., Any]:
        # SGLang may reject the request within the method, so note its arrival first.
        def stepscope_add_request_to_queue(req: SglangReq, *args: Any, **kwargs: Any) -> Any:
            is_retracted = bool(kwargs.get("is_retracted"))
            attachment.note(lambda: self._watcher.queued(req, is_retracted))
            return add(req, *args, **kwargs)

        return stepscope_add_request_to_queue

    def _before_abort(self, attachment: Attachment, send: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_send_abort_output(
            request: Any, req: SglangReq, *args: Any, **kwargs: Any
        ) -> Any:
            attachment.note(lambda: self._watcher.aborted(req))
            return send(request, req, *args, **kwargs)

        return stepscope_send_abort_output

    def _around_evict(
        self, attachment: Attachment, evict: Callable[..., Any]
    ) -> Callable[..., Any]:
        pool = self._watcher.pool

        def stepscope_evict(*args: Any, **kwargs: Any) -> Any:
            before = pool.num_evicted_tokens  # one evict method may call the other: count once
            result = evict(*args, **kwargs)
            attachment.note(lambda: pool.evicted(before, result.num_tokens_evicted))
            return result

        return stepscope_evict

    def _around_turn(self, attachment: Attachment, poll: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `_poll_timeout_aborts`: SGLang's first rank adds its result to the loop's requests.

        The wrapper applies commands, and adds our requests to change knobs to the result.
        """

        def tend() -> None:
            attachment.tend_if_due()
            attachment.core.apply_deferred()

        def stepscope_poll_timeout_aborts(*args: Any, **kwargs: Any) -> Any:
            requests = poll(*args, **kwargs)
            attachment.note(tend)
            with attachment.lock:
                if not attachment.is_attached:
                    self._turns.restore()
                return [*requests, *self._requests.drain()]

        return stepscope_poll_timeout_aborts
