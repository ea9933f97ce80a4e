"""The entry point of `vllm.general_plugins`. vLLM calls it in each of its processes.

Without STEPSCOPE_ENDPOINT it does nothing and imports nothing of ours. vLLM does not catch the
errors of a plugin, so this one raises none.
"""

import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "STEPSCOPE_ENDPOINT"
_END_S = 1.0  # the least time that an engine process gets to say that it stops

log = logging.getLogger("vllm.stepscope")


def register() -> None:
    """Attach to the scheduler that this process will build, if STEPSCOPE_ENDPOINT is set."""
    endpoint = os.environ.get(VARIABLE, "").strip()
    if not endpoint:
        return
    try:
        _wrap_choice(endpoint)
        _wrap_front_end(endpoint)
        _wrap_workers(endpoint)
        if multiprocessing.parent_process() is None:
            _wrap_shutdown()
    except Exception as error:  # noqa: BLE001 - vLLM starts whatever happens here
        _warn(error)


def _wrap_shutdown() -> None:
    """Let the front end wait for its engine processes before it kills them.

    Without a `shutdown_timeout` it kills them in the instant after SIGTERM. Then nobody would learn
    that the engine has stopped, and its files would stay.
    """
    try:
        from vllm.v1 import utils
        from vllm.v1.engine import utils as engine_utils
    except ImportError:
        return  # this release ends them by something else

    shutdown = utils.shutdown
    if hasattr(shutdown, "_stepscope"):
        return

    @functools.wraps(shutdown)
    def stepscope_shutdown(procs: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return shutdown(procs, timeout if timeout is None else max(timeout, _END_S), **kwargs)

    stepscope_shutdown._stepscope = True  # type: ignore[attr-defined]
    for module in (utils, engine_utils):
        if getattr(module, "shutdown", None) is shutdown:
            module.shutdown = stepscope_shutdown


def _wrap_choice(endpoint: str) -> None:
    """Wrap the method by which vLLM chooses the class of its scheduler, to attach to an instance.

    Wrapping `EngineCore.__init__` would be too late: in a spawned process, `EngineCore.__init__`
    already runs when vLLM loads its plugins.
    """
    from vllm.config.scheduler import SchedulerConfig

    def wrap_init(_: Any, chosen: Any) -> None:
        def attach_to(scheduler: Any, _: None) -> None:
            if type(scheduler) is chosen:  # else a subclass has not finished its __init__
                from stepscope.engine.adapters.vllm.attachment import attach

                attach(scheduler, endpoint)

        after(chosen, "__init__", attach_to)

    after(SchedulerConfig, "get_scheduler_cls", wrap_init)


def _wrap_front_end(endpoint: str) -> None:
    """Wrap what API servers do first, and only they: then their front end can be imported."""

    def hook(arguments: Any, config: Any) -> None:
        from stepscope.engine.adapters.vllm import front_end

        front_end.hook(endpoint, after)
        _wrap_workers(endpoint)  # for processes forked from this one

    if (arguments := sys.modules.get("vllm.engine.arg_utils")) is not None:
        after(arguments.EngineArgs, "create_engine_config", hook)


def _wrap_workers(endpoint: str) -> None:
    """Wrap what each worker does once vLLM's groups of ranks are there."""

    def watch(wrapper: Any, _: None) -> None:
        from stepscope.engine.adapters.vllm import ranks

        ranks.watch(wrapper.worker, endpoint)

    if (module := sys.modules.get("vllm.v1.worker.worker_base")) is not None:
        after(module.WorkerWrapperBase, "init_device", watch)


def after(owner: Any, name: str, ours: Callable[[Any, Any], None]) -> None:
    """Wrap a method of a class, once, to call `ours(self, result)` after it and log its error."""
    method = getattr(owner, name)
    if getattr(method, "_stepscope", None) is owner:
        return

    @functools.wraps(method)
    def stepscope_after(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        try:
            ours(self, result)
        except Exception as error:  # noqa: BLE001
            _warn(error)
        return result

    stepscope_after._stepscope = owner  # type: ignore[attr-defined]
    setattr(owner, name, stepscope_after)


def _warn(error: Exception) -> None:
    log.warning("stepscope is not attached: %s: %s", type(error).__name__, error)
