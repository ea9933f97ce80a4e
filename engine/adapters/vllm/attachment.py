"""Attaches to a scheduler of vLLM by wrapping its methods, and describes it (`EngineInfo`).

The wrappers run on the scheduler's thread.
"""

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from time import monotonic_ns
from typing import Any

import msgspec

from stepscope.engine.adapters.attached.attached_core import AttachedCore
from stepscope.engine.adapters.attached.attachment import AttachedEngine, Attachment
from stepscope.engine.adapters.attached.description import (
    AttachedKnobs,
    described,
    known,
    rank_endpoint,
)
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.knobs import knobs_of
from stepscope.engine.adapters.vllm.versions import (
    SchedulerOutput,
    VllmBlock,
    VllmRequest,
    VllmScheduler,
)
from stepscope.engine.adapters.vllm.watcher import VllmWatcher
from stepscope.engine.protocol.commands import Pause, Resume
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.transport.endpoints import Endpoint, reports_path

_API = "vLLM's own API"  # the client is unknown


def describe(
    scheduler: VllmScheduler, knobs: AttachedKnobs, endpoint: Endpoint, watcher: VllmWatcher
) -> EngineInfo:
    """Return the engine's description. Values that this version of vLLM lacks are None."""
    groups = watcher.groups
    config = scheduler.vllm_config
    model, parallel = config.model_config, config.parallel_config
    vllm_version = known(_vllm_version)
    size = parallel.data_parallel_size
    return msgspec.structs.replace(
        described("vllm", endpoint, knobs),
        model=str(known(lambda: _first(model.served_model_name)) or model.model),
        architecture=known(lambda: str(model.architectures[0])),
        dtype=known(lambda: str(model.dtype).removeprefix("torch.")),
        kv_cache_dtype=known(lambda: str(config.cache_config.cache_dtype)),
        device=known(lambda: str(config.device_config.device)),
        implementation=f"vLLM {vllm_version or ''}".strip(),
        num_layers=known(lambda: int(model.get_num_layers(parallel))),
        num_kv_heads=known(lambda: int(model.get_total_num_kv_heads())),
        head_dim=known(lambda: int(model.get_head_size())),
        block_size=scheduler.block_size,
        num_blocks=None if watcher.pool is None else watcher.pool.num_blocks,
        overlap=bool(getattr(scheduler.scheduler_config, "async_scheduling", False)),
        engine_version=vllm_version,
        data_parallel_rank=versions.data_parallel_rank(scheduler) if size > 1 else None,
        data_parallel_size=size,
        tensor_parallel_size=known(lambda: int(parallel.tensor_parallel_size)),
        pipeline_parallel_size=known(lambda: int(parallel.pipeline_parallel_size)),
        role={"kv_producer": "prefill", "kv_consumer": "decode"}.get(
            str(getattr(getattr(config, "kv_transfer_config", None), "kv_role", None))
        ),
        kv_groups=groups,
        kv_tokens=None
        if groups is None
        else known(lambda: int(config.cache_config.kv_cache_size_tokens)),
        max_graph_tokens=known(lambda: versions.max_graph_tokens(config)),
    )


def endpoint_of(scheduler: VllmScheduler, text: str) -> Endpoint:
    """Return the endpoint of this data-parallel rank, as `rank_endpoint` derives it from `text`."""
    size = scheduler.vllm_config.parallel_config.data_parallel_size
    return rank_endpoint(text, versions.data_parallel_rank(scheduler), size)


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def _first(names: object) -> str | None:
    return (
        str(names[0]) if isinstance(names, list | tuple) else None if names is None else str(names)
    )


def attach(scheduler: Any, endpoint: str) -> Attachment:
    """Watch a scheduler that vLLM has just built, and return the attachment.

    Args:
        endpoint: an endpoint as in STEPSCOPE_ENDPOINT.

    Raises:
        Exception: the scheduler cannot be watched, or the endpoint is not available. The scheduler
            is then unchanged.
    """
    versions.check(scheduler)
    at = endpoint_of(scheduler, endpoint)
    knobs, watcher = knobs_of(scheduler), VllmWatcher(scheduler, reports_path(at))
    attachment = Attachment(
        AttachedEngine(
            "vLLM",
            logging.getLogger("vllm.stepscope"),
            at,
            describe(scheduler, knobs, at, watcher),
            watcher,
            knobs,
            _VllmHooks(scheduler, watcher).hook,
            watcher.reports,
        )
    )
    # With a timeout, running requests end first, and then `clear_backend` is called.
    if not getattr(scheduler.vllm_config, "shutdown_timeout", 0):
        attachment.close_at_signal()
    return attachment


class _VllmHooks:
    """Wraps the methods of one scheduler, so that they report to the watcher."""

    def __init__(self, scheduler: VllmScheduler, watcher: VllmWatcher) -> None:
        self._scheduler = scheduler
        self._watcher = watcher

    def hook(self, attachment: Attachment) -> None:
        """Wrap the scheduler's methods."""
        scheduler, watcher = self._scheduler, self._watcher
        hooks = attachment.hooks_on(scheduler)
        hooks.wrap("schedule", lambda method: self._around_schedule(attachment, method))
        hooks.wrap("update_from_output", lambda method: self._around_update(attachment, method))
        hooks.wrap("add_request", lambda method: self._around_add(attachment, method))
        hooks.wrap("finish_requests", lambda method: attachment.after(method, self._note_ended))
        if not versions.names_preempted(scheduler):
            attachment.hooks_on(scheduler.waiting).wrap(
                "prepend_request", lambda method: self._around_put_back(attachment, method)
            )
        if watcher.device_times is not None:
            watcher.device_times.hook(attachment)
        if watcher.holders is not None:
            manager = scheduler.kv_cache_manager
            attachment.hooks_on(manager.block_pool).wrap(
                "free_blocks", lambda method: self._around_free(attachment, method)
            )
            if getattr(scheduler, "connector", None) is not None:
                attachment.hooks_on(manager).wrap(
                    "allocate_slots", lambda method: self._around_allocate(attachment, method)
                )
        if hasattr(scheduler, "reset_prefix_cache"):
            hooks.wrap("reset_prefix_cache", lambda method: self._around_reset(attachment, method))
        if hasattr(scheduler, "set_pause_state"):
            note = functools.partial(self._note_pause, attachment.core)
            hooks.wrap("set_pause_state", lambda method: attachment.after(method, note))
        if hasattr(scheduler, "shutdown"):
            hooks.wrap("shutdown", attachment.before_end)
        # On exit, vLLM calls `clear_backend` before anything else. It then waits for its workers,
        # and may be killed before it shuts down its scheduler.
        grammars = getattr(scheduler, "structured_output_manager", None)
        if hasattr(grammars, "clear_backend"):
            attachment.hooks_on(grammars).wrap("clear_backend", attachment.before_end)

    def _around_schedule(
        self, attachment: Attachment, schedule: Callable[..., SchedulerOutput]
    ) -> Callable[..., Any]:
        scheduler, watcher, lock = self._scheduler, self._watcher, attachment.lock
        notes = attachment.notes

        def stepscope_schedule(*args: Any, **kwargs: Any) -> SchedulerOutput:
            with lock:
                start_ns = budget = 0
                if attachment.is_attached:
                    try:
                        start_ns = attachment.tend_if_due()
                        budget = versions.token_budget(scheduler)
                    except Exception as error:  # noqa: BLE001
                        attachment.fail(error)
                out = schedule(*args, **kwargs)
                if attachment.is_attached:
                    try:
                        is_throttled = bool(args[0] if args else kwargs.get("throttle_prefills"))
                        noted = watcher.note(
                            out, start_ns, monotonic_ns(), budget, is_throttled=is_throttled
                        )
                        if noted is not None:
                            notes.put(watcher.scheduled, out, noted)
                            if versions.changes_later(out):
                                notes.read()
                            if noted.loads and not out.total_num_scheduled_tokens:
                                with notes.done():
                                    watcher.recorder.settle_empty()
                                    self._publish_status(attachment)
                        elif (held := watcher.held_anew()) is not None:
                            with notes.done():
                                watcher.recorder.hold_between(held)
                                self._publish_status(attachment)
                    except Exception as error:  # noqa: BLE001
                        attachment.fail(error)
                return out

        return stepscope_schedule

    def _publish_status(self, attachment: Attachment) -> None:
        attachment.core.heartbeat.publish_status(attachment.core.state)

    def _around_update(
        self, attachment: Attachment, update: Callable[..., Any]
    ) -> Callable[..., Any]:
        watcher, lock = self._watcher, attachment.lock
        publisher, notes = attachment.publisher, attachment.notes
        has_pool = watcher.pool is not None

        def publish(
            out: SchedulerOutput,
            result: object,
            tokens_ns: int,
            num_got: Mapping[str, int],
            kv_used: float | None,
            finished: Collection[str],
            freed: list[int],
        ) -> None:
            ended_now = watcher.note_ended(finished, freed)
            graph = versions.cuda_graph(result)
            record = watcher.updated(
                out, graph, tokens_ns, publisher.num_dropped, ended_now, num_got, kv_used
            )
            if record is not None:
                publisher.publish(record)

        def stepscope_update_from_output(
            out: SchedulerOutput, model_runner_output: Any, *args: Any, **kwargs: Any
        ) -> Any:
            with lock:
                tokens_ns = attachment.seen()
                drafted: list[tuple[str, VllmRequest, int]] = []
                if out.scheduled_spec_decode_tokens:
                    attachment.guard(lambda: drafted.extend(watcher.drafted(out)))
                result = update(out, model_runner_output, *args, **kwargs)
                if attachment.is_attached:
                    try:
                        num_got = {
                            name: request.num_output_tokens - before
                            for name, request, before in drafted
                        }
                        ended = tuple(self._scheduler.finished_req_ids), watcher.take_freed()
                        kv_used = None if has_pool else watcher.kv_used
                        found = (out, model_runner_output, tokens_ns, num_got, kv_used)
                        notes.put(publish, *found, *ended)
                        notes.wake()
                    except Exception as error:  # noqa: BLE001
                        attachment.fail(error)
                return result

        return stepscope_update_from_output

    def _around_add(self, attachment: Attachment, add: Callable[..., Any]) -> Callable[..., Any]:
        scheduler, watcher = self._scheduler, self._watcher

        def stepscope_add_request(request: VllmRequest, *args: Any, **kwargs: Any) -> Any:
            with attachment.lock:
                result = add(request, *args, **kwargs)
                if attachment.is_attached:
                    try:
                        attachment.notes.put(watcher.added, request)
                        # A request may end on arrival, or end another request.
                        if scheduler.finished_req_ids:
                            with attachment.notes.done():
                                self._note_ended()
                    except Exception as error:  # noqa: BLE001
                        attachment.fail(error)
                return result

        return stepscope_add_request

    def _around_free(self, attachment: Attachment, free: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_free_blocks(blocks: Iterable[VllmBlock], *args: Any, **kwargs: Any) -> Any:
            freed = list(blocks)
            result = free(freed, *args, **kwargs)
            attachment.guard(lambda: self._watcher.note_freed(freed))
            return result

        return stepscope_free_blocks

    def _around_allocate(
        self, attachment: Attachment, allocate: Callable[..., Any]
    ) -> Callable[..., Any]:
        def stepscope_allocate_slots(request: VllmRequest, *args: Any, **kwargs: Any) -> Any:
            result = allocate(request, *args, **kwargs)
            num_tokens = kwargs.get("num_external_computed_tokens", 0)  # not told by early releases
            waits = bool(kwargs.get("delay_cache_blocks"))
            if result is not None and (num_tokens or waits):
                note = self._watcher.note_load
                attachment.guard(lambda: note(request, num_tokens, waits=waits))
            return result

        return stepscope_allocate_slots

    def _around_put_back(
        self, attachment: Attachment, prepend: Callable[..., Any]
    ) -> Callable[..., Any]:
        def stepscope_prepend_request(request: VllmRequest) -> None:
            prepend(request)
            attachment.note(lambda: self._watcher.put_back(request))

        return stepscope_prepend_request

    def _around_reset(
        self, attachment: Attachment, reset: Callable[..., Any]
    ) -> Callable[..., Any]:
        def stepscope_reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
            with attachment.lock:
                were_running = {request.request_id for request in self._scheduler.running}
                result = reset(*args, **kwargs)
                are_running = {request.request_id for request in self._scheduler.running}
                attachment.note(lambda: self._watcher.forgot_cache(were_running - are_running))
                return result

        return stepscope_reset_prefix_cache

    def _note_pause(self, core: AttachedCore) -> None:
        match versions.halt(self._scheduler):
            case None:
                core.note_change(Resume(who=_API), "")
            case "draining":
                core.note_change(Pause(who=_API), "running requests end, the others wait")
            case _:
                core.note_change(Pause(who=_API), "")

    def _note_ended(self) -> None:
        self._watcher.note_ended(self._scheduler.finished_req_ids, self._watcher.take_freed())
