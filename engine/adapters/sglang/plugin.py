"""The entry point of `sglang.srt.plugins`. SGLang calls it in each of its processes.

Without STEPSCOPE_ENDPOINT it does nothing and imports nothing of ours.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "STEPSCOPE_ENDPOINT"
_MODULE = "sglang.srt.managers.scheduler"

log = logging.getLogger("sglang.stepscope")


def register() -> None:
    """Attach to the scheduler that this process will run, if STEPSCOPE_ENDPOINT is set."""
    if not os.environ.get(VARIABLE, "").strip() or _MODULE not in sys.modules:
        return  # a process that runs no scheduler does not import its module
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from stepscope.engine.adapters.sglang.attachment import around_change

        owner, around = f"{_MODULE}.Scheduler", HookType.AROUND
        HookRegistry.register(f"{owner}.run_event_loop", _around_event_loop, around)
        # On every tensor-parallel rank, also where stepscope does not attach.
        HookRegistry.register(f"{owner}.set_internal_state", around_change, around)
    except Exception as error:  # noqa: BLE001 - SGLang starts whatever happens here
        _warn(error)


def _around_event_loop(run: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    attachment = None
    try:
        from stepscope.engine.adapters.sglang.attachment import attach

        attachment = attach(scheduler, os.environ[VARIABLE].strip())
    except Exception as error:  # noqa: BLE001
        _warn(error)
    try:
        return run(scheduler, *args, **kwargs)
    finally:
        if attachment is not None:
            attachment.close()


def _warn(error: Exception) -> None:
    log.warning("stepscope is not attached: %s: %s", type(error).__name__, error)
