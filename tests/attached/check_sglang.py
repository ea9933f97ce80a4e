"""Holds the SGLang adapter to the source of SGLang: `make test-sglang`.

SGLang runs on a GPU only, so nothing of it runs here but its registry of hooks. All names that the
adapter and its stand-in use are looked up in the wheel, without importing it.

    python -m tests.attached.check_sglang [WHEEL]
"""

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

from stepscope.engine.adapters.sglang import plugin, support
from stepscope.engine.adapters.sglang.broadcast import SEATS
from tests.adapters.sglang_stand_in import Scheduler, SetInternalStateReq, TokenizedGenerateReqInput

SRT = "sglang/srt/"
SCHEDULER = "managers/scheduler.py"
BATCH = "managers/schedule_batch.py"
CACHE = "mem_cache/base_prefix_cache.py"
POOL = "managers/scheduler_components/pool_stats_observer.py"
# Fields and methods of each class, by file.
NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    (SCHEDULER, "Scheduler"): (*support.NEEDED, "run_event_loop"),
    (BATCH, "Req"): (
        *("rid", "origin_input_ids", "output_ids", "finished_len", "finished_reason"),
        *("priority", "kv", "sampling_params", "time_stats", "is_retracted", "to_finish"),
    ),
    (BATCH, "ReqKvInfo"): ("kv_committed_len",),
    (BATCH, "BaseFinishReason"): ("to_json",),
    (BATCH, "ScheduleBatch"): (
        *("reqs", "forward_mode", "forward_iter", "batch_is_full", "prefix_lens", "extend_lens"),
        *("copy", "filter_batch"),
    ),
    (BATCH, "NextBatchPlan"): ("batch_to_run", "running_batch"),
    ("model_executor/forward_batch_info.py", "ForwardMode"): ("is_decode", "is_extend", "is_idle"),
    ("observability/req_time_stats.py", "SchedulerReqTimeStats"): (
        "created_time",
        "scheduler_recv_time",
    ),
    (POOL, "SchedulerPoolStatsObserver"): ("get_pool_stats",),
    (POOL, "PoolStats"): ("full_available_size", "full_evictable_size", "full_capacity"),
    (CACHE, "BasePrefixCache"): ("evict", "evict_for_alloc"),
    (CACHE, "EvictResult"): ("num_tokens_evicted",),
    ("managers/io_struct.py", "SetInternalStateReq"): ("server_args",),
}
# The first parameters of each method of the scheduler that is hooked or called.
PARAMETERS = {
    "get_next_batch_to_run": ["self", "running_batch", "last_batch"],
    "run_batch": ["self", "batch"],
    "process_batch_result": ["self", "batch", "result"],
    "_add_request_to_queue": ["self", "req"],
    "send_abort_output": ["self", "abort_req", "req"],
    "set_internal_state": ["self", "recv_req"],
    "_poll_timeout_aborts": ["self"],
    "run_event_loop": ["self"],
}
# What the adapter relies on, as it stands in the source.
TEXTS = {
    SCHEDULER: (
        "local_reqs = self._poll_timeout_aborts()",
        "self.request_receiver.recv_requests(local_reqs=local_reqs)",
        "(SetInternalStateReq, self.set_internal_state)",
        "chunked_prefill_size = self.chunked_prefill_size",
        "get_parallel().pp_max_micro_batch_size - running_bs",
    ),
    "managers/scheduler_components/internal_state.py": (f'"{SEATS}": _UpdateHandler(',),
    "arg_groups/fields/parallel.py": ("nnodes: A[", f"{SEATS}: A[", "dp_size: A[", "tp_size: A["),
    "runtime_context.py": ("def get_parallel()", '"attn_dp_rank"', '"attn_tp_rank"'),
}
HOOKS = "plugins/hook_registry.py"


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        wheel = Path(arguments[0]) if arguments else download(Path(temporary))
        with ZipFile(wheel) as archive:
            files = {*(file for file, _ in NAMES), *TEXTS, HOOKS}
            sources = {file: archive.read(SRT + file).decode() for file in files}
        faults = [*missing_names(sources), *other_parameters(sources), *missing_texts(sources)]
        if not attaches_by_its_registry(sources[HOOKS], Path(temporary)):
            faults.append("the plugin did not attach through SGLang's registry of hooks")
    print(f"{wheel.name}: {sum(map(len, NAMES.values()))} names, {len(PARAMETERS)} signatures")
    for fault in faults:
        print(f"  {fault}")
    print("all is well" if not faults else f"{len(faults)} faults")
    return bool(faults)


def download(folder: Path) -> Path:
    """The wheel of the release whose source the adapter was written against."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, f"sglang=={support.READ_RELEASE}"], check=True)
    return next(folder.glob("sglang-*.whl"))


def missing_names(sources: dict[str, str]) -> Iterator[str]:
    for (file, owner), names in NAMES.items():
        found = names_of(class_of(sources[file], owner))
        for name in names:
            if name not in found:
                yield f"{file}: {owner} has no {name}"


def other_parameters(sources: dict[str, str]) -> Iterator[str]:
    for node in class_of(sources[SCHEDULER], "Scheduler").body:
        if isinstance(node, ast.FunctionDef) and node.name in PARAMETERS:
            wanted = PARAMETERS[node.name]
            found = [argument.arg for argument in node.args.args]
            if found[: len(wanted)] != wanted:
                yield f"{SCHEDULER}: {node.name} takes {found}, not {wanted}"


def missing_texts(sources: dict[str, str]) -> Iterator[str]:
    for file, texts in TEXTS.items():
        for text in texts:
            if text not in sources[file]:
                yield f"{file}: no {text!r}"


def class_of(source: str, name: str) -> ast.ClassDef:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"SGLang has no class {name}")


def names_of(owner: ast.ClassDef) -> set[str]:
    """Its methods, fields, and what its methods set on `self`."""
    names = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    return names


def attaches_by_its_registry(source: str, folder: Path) -> bool:
    """Run the stand-in with SGLang's own registry: whether the plugin attached and ended."""
    names = ("", ".srt", ".srt.managers", ".srt.managers.io_struct", ".srt.managers.scheduler")
    modules = {f"sglang{name}": ModuleType(f"sglang{name}") for name in names}
    for name in ("runtime_context", "plugins", "plugins.hook_registry"):
        modules[f"sglang.srt.{name}"] = ModuleType(f"sglang.srt.{name}")
    for name, module in modules.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    registry = modules["sglang.srt.plugins.hook_registry"]
    exec(compile(source, HOOKS, "exec"), vars(registry))
    scheduler = Scheduler()
    vars(modules["sglang.srt.managers.io_struct"]).update(SetInternalStateReq=SetInternalStateReq)
    vars(modules["sglang.srt.managers.scheduler"]).update(Scheduler=Scheduler)
    vars(modules["sglang.srt.runtime_context"]).update(get_parallel=lambda: scheduler.parallel)
    os.environ[plugin.VARIABLE] = f"ipc://{folder}/sglang"
    seen: list[bool] = []

    def look() -> list[object]:
        seen.append(any(path.is_socket() for path in folder.iterdir()))
        return []

    vars(scheduler)["_poll_timeout_aborts"] = look
    plugin.register()
    registry.HookRegistry.apply_hooks()
    scheduler.process_input_requests([TokenizedGenerateReqInput("a", [1] * 40)])
    scheduler.run_event_loop()
    return all(seen) and not any(path.is_socket() for path in folder.iterdir())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
