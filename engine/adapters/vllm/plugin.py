"""The entry point of `vllm.general_plugins`. vLLM calls it in each of its processes.

Without STEPSCOPE_ENDPOINT it does nothing and imports nothing of ours. vLLM does not catch the
errors of a plugin, so this one raises none.
"""

import functools
import logging
import multiprocessing
import os
import sys
from typing import Any

VARIABLE = "STEPSCOPE_ENDPOINT"

log = logging.getLogger("vllm.stepscope")


def register() -> None:
    """Attach to the scheduler that this process will build, if STEPSCOPE_ENDPOINT is set."""
    endpoint = os.environ.get(VARIABLE, "").strip()
    if not endpoint:
        return
    try:
        _wrap_choice(endpoint)
        _wrap_front_end(endpoint)
        if multiprocessing.parent_process() is None:
            _wrap_shutdown(endpoint)
    except Exception as error:  # noqa: BLE001 - vLLM starts whatever happens here
        _warn(error)


def _wrap_shutdown(endpoint: str) -> None:
    """Wrap the function by which the front end ends the engine processes."""
    try:
        from vllm.v1 import utils
        from vllm.v1.engine import utils as engine_utils
    except ImportError:
        return  # this release ends them by something else

    shutdown = utils.shutdown
    if hasattr(shutdown, "_stepscope"):
        return

    @functools.wraps(shutdown)
    def stepscope_shutdown(procs: Any, *args: Any, **kwargs: Any) -> Any:
        has_ended: list[Any] = []

        def end() -> None:
            has_ended.append(shutdown(procs, *args, **kwargs))

        try:
            from stepscope.engine.adapters.vllm import orderly_end

            timeout = args[0] if args else kwargs.get("timeout")
            orderly_end.end(endpoint, procs, end, at_once=timeout == 0)
        except Exception as error:  # noqa: BLE001
            log.debug("stepscope: %s", error)
        return has_ended[0] if has_ended else shutdown(procs, *args, **kwargs)

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

    if not hasattr(SchedulerConfig, "get_scheduler_cls"):  # before 0.11.1
        _wrap_vllms_own(endpoint)
        return
    choose = SchedulerConfig.get_scheduler_cls
    if hasattr(choose, "_stepscope"):
        return

    @functools.wraps(choose)
    def get_scheduler_cls(self: Any) -> Any:
        chosen = choose(self)
        try:
            _wrap_init(chosen, endpoint)
        except Exception as error:  # noqa: BLE001
            _warn(error)
        return chosen

    get_scheduler_cls._stepscope = True  # type: ignore[attr-defined]
    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def _wrap_vllms_own(endpoint: str) -> None:
    """Wrap both scheduler classes. For releases of vLLM that have no method to choose the class."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    for each in (Scheduler, AsyncScheduler):
        _wrap_init(each, endpoint)


def _wrap_init(scheduler_class: Any, endpoint: str) -> None:
    init = scheduler_class.__init__
    if getattr(init, "_stepscope", None) is scheduler_class:
        return

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        init(self, *args, **kwargs)
        if type(self) is not scheduler_class:
            return  # a subclass has not finished its own __init__
        try:
            from stepscope.engine.adapters.vllm.attachment import attach

            attach(self, endpoint)
        except Exception as error:  # noqa: BLE001
            _warn(error)

    __init__._stepscope = scheduler_class  # type: ignore[attr-defined]
    scheduler_class.__init__ = __init__


def _wrap_front_end(endpoint: str) -> None:
    """Wrap what API servers do first, and only they: then their front end can be imported."""
    if (arguments := sys.modules.get("vllm.engine.arg_utils")) is None:
        return
    create = arguments.EngineArgs.create_engine_config
    if hasattr(create, "_stepscope"):
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        try:
            from stepscope.engine.adapters.vllm import front_end

            front_end.hook(endpoint)
        except Exception as error:  # noqa: BLE001
            log.warning("stepscope does not watch this API server: %r", error)
        return config

    create_engine_config._stepscope = True  # type: ignore[attr-defined]
    arguments.EngineArgs.create_engine_config = create_engine_config


def _warn(error: Exception) -> None:
    log.warning("stepscope is not attached: %s: %s", type(error).__name__, error)
