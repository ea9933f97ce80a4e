"""Attaches to a scheduler of vLLM by wrapping its methods; describes it (`EngineInfo`), its knobs.

The wrappers run on the scheduler's thread.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
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
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.versions import SchedulerOutput, VllmRequest, VllmScheduler
from stepscope.engine.adapters.vllm.watcher import VllmWatcher
from stepscope.engine.protocol.commands import Pause, Resume
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.wire import EngineInfo, KnobValue
from stepscope.engine.transport.endpoints import Endpoint, reports_path

_API = "vLLM's own API"  # the client is unknown


def describe(
    scheduler: VllmScheduler, knobs: AttachedKnobs, endpoint: Endpoint, watcher: VllmWatcher
) -> EngineInfo:
    """Return the engine's description. Values that this version of vLLM lacks are None."""
    groups, config = watcher.groups, scheduler.vllm_config
    model, parallel = config.model_config, config.parallel_config
    names, size = getattr(model, "served_model_name", ""), parallel.data_parallel_size
    release = known(lambda: str(sys.modules["vllm"].__version__))
    cache, transfer = scheduler.cache_config, getattr(config, "kv_transfer_config", None)
    roles = {"kv_producer": "prefill", "kv_consumer": "decode"}
    return msgspec.structs.replace(
        described("vllm", endpoint, knobs),
        model=str((names[0] if isinstance(names, list | tuple) else names) or model.model),
        architecture=known(lambda: str(model.architectures[0])),
        dtype=known(lambda: str(model.dtype).removeprefix("torch.")),
        kv_cache_dtype=known(lambda: str(cache.cache_dtype)),
        device=known(lambda: str(config.device_config.device)),
        implementation=f"vLLM {release or ''}".strip(),
        num_layers=known(lambda: int(model.get_num_layers(parallel))),
        num_kv_heads=known(lambda: int(model.get_total_num_kv_heads())),
        head_dim=known(lambda: int(model.get_head_size())),
        block_size=scheduler.block_size,
        num_blocks=None if watcher.pool is None else watcher.pool.num_blocks,
        overlap=bool(getattr(scheduler.scheduler_config, "async_scheduling", False)),
        engine_version=release,
        data_parallel_rank=versions.data_parallel_rank(scheduler) if size > 1 else None,
        data_parallel_size=size,
        tensor_parallel_size=known(lambda: int(parallel.tensor_parallel_size)),
        pipeline_parallel_size=known(lambda: int(parallel.pipeline_parallel_size)),
        role=roles.get(str(getattr(transfer, "kv_role", None))),
        kv_groups=groups,
        kv_tokens=None if groups is None else known(lambda: int(cache.kv_cache_size_tokens)),
        max_graph_tokens=known(lambda: versions.max_graph_tokens(config)),
    )


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
    places = {
        name: (getattr(scheduler, live.owner) if live.owner else scheduler, live.attribute)
        for name, live in versions.LIVE.items()
    }
    if scheduler.vllm_config.parallel_config.data_parallel_size > 1:
        # Several ranks that step together: their engine decides which steps take prefills.
        del places["prefill_schedule_interval"]
    theirs = {name: getattr(*place) for name, place in places.items() if hasattr(*place)}

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
            setattr(*places[name], their)

    return AttachedKnobs("vLLM", limits, values, {n: bounds.get(n, {}) for n in theirs}, write)


def attach(scheduler: Any, endpoint: str) -> Attachment:
    """Watch a scheduler that vLLM has just built, and return the attachment.

    `endpoint`: as in STEPSCOPE_ENDPOINT; `rank_endpoint` derives that of this data-parallel rank.

    Raises:
        Exception: the scheduler cannot be watched, or the endpoint is not available. The scheduler
            is then unchanged.
    """
    versions.check(scheduler)
    size = scheduler.vllm_config.parallel_config.data_parallel_size
    at = rank_endpoint(endpoint, versions.data_parallel_rank(scheduler), size)
    knobs, watcher = knobs_of(scheduler), VllmWatcher(scheduler, reports_path(at))
    log, info = logging.getLogger("vllm.stepscope"), describe(scheduler, knobs, at, watcher)
    hook = partial(_VllmHooks, scheduler, watcher)
    return Attachment("vLLM", log, at, info, watcher, knobs, hook, watcher.reports)


class _VllmHooks:
    """Wraps the methods of one scheduler, so that they report to the watcher."""

    def __init__(
        self, scheduler: VllmScheduler, watcher: VllmWatcher, attachment: Attachment
    ) -> None:
        self._scheduler, self._watcher, self._attachment = scheduler, watcher, attachment
        wrap, before_end = attachment.hooks.wrap, attachment.before_end
        wrap(scheduler, "schedule", self._around_schedule)
        wrap(scheduler, "update_from_output", self._around_update)
        wrap(scheduler, "add_request", self._around_add)
        wrap(scheduler, "finish_requests", lambda finish: self._locked(finish, self._note_ended))
        wrap(scheduler, "reset_prefix_cache", self._around_reset)
        wrap(scheduler, "set_pause_state", lambda pause: self._locked(pause, self._note_pause))
        wrap(scheduler, "shutdown", before_end)
        # On exit, vLLM calls `clear_backend` before anything else. It then waits for its workers,
        # and may be killed before it shuts down its scheduler.
        grammars = getattr(scheduler, "structured_output_manager", None)
        wrap(grammars, "clear_backend", before_end)
        if watcher.device_times is not None:
            watcher.device_times.hook(attachment)
        if watcher.holders is not None:
            manager = scheduler.kv_cache_manager
            wrap(manager.block_pool, "free_blocks", self._around_free)
            if getattr(scheduler, "connector", None) is not None:
                wrap(manager, "allocate_slots", self._around_allocate)

    def _around_schedule(self, schedule: Callable[..., SchedulerOutput]) -> Callable[..., Any]:
        scheduler, watcher, attachment = self._scheduler, self._watcher, self._attachment
        lock, notes, core = attachment.lock, attachment.notes, attachment.core

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
                                    core.heartbeat.publish_status(core.state)
                        elif (held := watcher.held_anew()) is not None:
                            with notes.done():
                                watcher.recorder.hold_between(held)
                                core.heartbeat.publish_status(core.state)
                    except Exception as error:  # noqa: BLE001
                        attachment.fail(error)
                return out

        return stepscope_schedule

    def _around_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        watcher, attachment = self._watcher, self._attachment
        lock, publisher, notes = attachment.lock, attachment.publisher, attachment.notes

        def publish(out: SchedulerOutput, result: object, tokens_ns: int, *told: Any) -> None:
            record = watcher.updated(out, result, tokens_ns, publisher.num_dropped, *told)
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
                        found = out, model_runner_output, tokens_ns, num_got, watcher.kv_used
                        notes.put(publish, *found, *ended)
                        notes.wake()
                    except Exception as error:  # noqa: BLE001
                        attachment.fail(error)
                return result

        return stepscope_update_from_output

    def _around_add(self, add: Callable[..., Any]) -> Callable[..., Any]:
        attachment = self._attachment

        def note_added(request: VllmRequest) -> None:
            attachment.notes.put(self._watcher.added, request)
            # A request may end on arrival, or end another request.
            if self._scheduler.finished_req_ids:
                with attachment.notes.done():
                    self._note_ended()

        def stepscope_add_request(request: VllmRequest, *args: Any, **kwargs: Any) -> Any:
            with attachment.lock:
                result = add(request, *args, **kwargs)
                attachment.guard(lambda: note_added(request))
                return result

        return stepscope_add_request

    def _around_free(self, free: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_free_blocks(blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            freed = list(blocks)
            result = free(freed, *args, **kwargs)
            self._attachment.guard(lambda: self._watcher.note_freed(freed))
            return result

        return stepscope_free_blocks

    def _around_allocate(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_allocate_slots(request: VllmRequest, *args: Any, **kwargs: Any) -> Any:
            result = allocate(request, *args, **kwargs)
            num_tokens = kwargs.get("num_external_computed_tokens", 0)
            waits = bool(kwargs.get("delay_cache_blocks"))
            if result is not None and (num_tokens or waits):
                note = self._watcher.note_load
                self._attachment.guard(lambda: note(request, num_tokens, waits=waits))
            return result

        return stepscope_allocate_slots

    def _locked(
        self,
        method: Callable[..., Any],
        after: Callable[..., object],
        before: Callable[[], Any] | None = None,
    ) -> Callable[..., Any]:
        around, lock = self._attachment.around(method, after, before), self._attachment.lock

        def stepscope_locked(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return around(*args, **kwargs)

        return stepscope_locked

    def _around_reset(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        def running() -> set[str]:
            return {request.request_id for request in self._scheduler.running}

        def forgot(were_running: set[str], *_: Any, **__: Any) -> None:
            self._watcher.forgot_cache(were_running - running())

        return self._locked(reset, forgot, running)

    def _note_pause(self, *_: Any, **__: Any) -> None:
        note_change, halt = self._attachment.core.note_change, versions.halt(self._scheduler)
        if halt is None:
            note_change(Resume(who=_API), "")
        else:
            text = "running requests end, the others wait" if halt == "draining" else ""
            note_change(Pause(who=_API), text)

    def _note_ended(self, *_: Any, **__: Any) -> None:
        self._watcher.note_ended(self._scheduler.finished_req_ids, self._watcher.take_freed())
