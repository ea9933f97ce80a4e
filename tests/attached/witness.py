"""A vLLM plugin that sees the same scheduler as stepscope, and notes what vLLM did.

It knows nothing of stepscope's adapter, so that what was published can be held against it. Lines of
JSON go to `WITNESS_DIR/calls.jsonl`. A file `block` there makes the next step take two seconds; a
file `fail` makes stepscope's own work fail.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_S = 2.0


def register() -> None:
    """Called by vLLM in each of its processes."""
    if multiprocessing.parent_process() is None:
        return  # the front end
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Scheduler, "witness"):
        return
    folder = Path(os.environ["WITNESS_DIR"])
    Scheduler.witness = True
    Scheduler.schedule = _schedule(Scheduler.schedule, folder)
    Scheduler.update_from_output = _update(Scheduler.update_from_output, folder)
    Worker.execute_model = _execute(Worker.execute_model, folder)


def _schedule(schedule: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    seen: list[bool] = []

    def witnessed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not seen:
            seen.append(True)
            modules = sorted(name for name in sys.modules if name.startswith("stepscope."))
            threads = [each.name for each in threading.enumerate() if "stepscope" in each.name]
            _write(folder, {"call": "first", "modules": modules, "threads": threads})
        if _take(folder / "fail"):
            _break_stepscope()
        out = schedule(self, *args, **kwargs)
        if out.total_num_scheduled_tokens:
            _write(folder, {"call": "schedule", "tokens": out.total_num_scheduled_tokens})
        return out

    return witnessed


def _update(update: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def witnessed(self: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, out, *args, **kwargs)
        if out.total_num_scheduled_tokens:
            pool = self.kv_cache_manager.block_pool
            num_used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            managers = self.kv_cache_manager.coordinator.single_type_managers
            tables = [list(each.req_to_blocks.values()) for each in managers]
            ids = [{each.block_id for blocks in table for each in blocks} - {0} for table in tables]
            tables_used = [len(each) for each in ids]
            _write(folder, {"call": "update", "used": num_used, "tables": tables_used})
        return result

    return witnessed


def _execute(execute: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def witnessed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _take(folder / "block"):
            time.sleep(BLOCK_S)
        return execute(self, *args, **kwargs)

    return witnessed


def _break_stepscope() -> None:
    from stepscope.engine.adapters.vllm.watcher import VllmWatcher

    def updated(*args: object) -> None:
        raise RuntimeError("injected by the witness")

    VllmWatcher.updated = updated  # type: ignore[method-assign,assignment]


def _take(path: Path) -> bool:
    """Whether the file existed; removes it."""
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def _write(folder: Path, line: dict[str, Any]) -> None:
    with (folder / "calls.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
