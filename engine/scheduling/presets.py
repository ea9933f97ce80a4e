"""`Preset`: the default settings of other engines (vLLM, SGLang, ...), expressed as our settings.

Presets differ by class of GPU. All these engines schedule a step while the step before it runs,
unless that is switched off.

Sources, from the code of the releases:
- vLLM 0.32 `EngineArgs.get_batch_defaults` (its API server) and `SchedulerConfig`.
- SGLang 0.5.23 `srt/arg_groups/memory_hook.py` (`chunked_prefill_size`),
  `srt/managers/schedule_policy.py` (prefill and decode in batches of their own unless
  `--enable-mixed-chunk`; blocks for the output are reserved), `srt/mem_cache/` (2,048 to 4,096
  running requests, by the memory for the KV cache).
- Mini-SGLang `scheduler/config.py` (`max_extend_tokens`), `engine/config.py` (`max_running_req`),
  `scheduler/prefill.py` (reserves prompt and output).
- TensorRT-LLM 1.x `TorchLlmArgs` and `SchedulerConfig` (GUARANTEED_NO_EVICT) of its documentation.
"""

from collections.abc import Collection
from typing import NamedTuple

from stepscope.engine.protocol.knobs import WrongValue
from stepscope.engine.protocol.wire import KnobValue


class GpuClass(NamedTuple):
    """The batch sizes that an engine chooses by default on the GPUs `gpus`, by their memory."""

    gpus: tuple[str, ...]
    max_num_batched_tokens: int
    max_num_seqs: int


class Preset(NamedTuple):
    """The default settings of one engine, expressed as our settings."""

    gpu_classes: tuple[GpuClass, ...]  # the first one is the default
    knobs: dict[str, KnobValue]
    block_size: int


class Defaults(NamedTuple):
    """The settings of one `Preset` on one class of GPU."""

    knobs: dict[str, KnobValue]
    engine: dict[str, KnobValue]  # settings of `EngineConfig`


_VLLM: dict[str, KnobValue] = {
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "batching": "chunked",
    "order": "arrival",
    "policy": "fcfs",
    "enable_prefix_caching": True,
    "watermark": 0.0,
}
_HUGE = GpuClass(("b200", "b300"), 16384, 1024)
_LARGE = GpuClass(("h100", "h200"), 8192, 1024)
_SMALL = GpuClass(("a100", "l40", "l4", "a10", "t4"), 2048, 256)
_SGLANG: dict[str, KnobValue] = _VLLM | {"batching": "separate", "reserve": "output"}
# It reserves 0.7 of the output at first, and retracts when that was too little; it runs 2,048 to
# 4,096 requests, by the memory for the KV cache.
_SGLANG_CLASSES = (
    GpuClass(("h100", "h200", "a100", "h20"), 8192, 2048),
    GpuClass(("l40", "a10", "l4"), 4096, 2048),
    GpuClass(("t4",), 2048, 2048),
    GpuClass(("b200", "mi300"), 16384, 2048),
)
# It refuses a prompt above its max_num_tokens.
_TENSORRT = _VLLM | {"enable_chunked_prefill": False, "reserve": "output"}

PRESETS = {
    "vllm": Preset((_LARGE, _SMALL, _HUGE), _VLLM | {"reserve": "prompt"}, 16),
    "sglang": Preset(_SGLANG_CLASSES, _SGLANG, 1),
    "mini-sglang": Preset((GpuClass((), 8192, 256),), _SGLANG, 1),
    "tensorrt-llm": Preset((GpuClass((), 8192, 2048),), _TENSORRT, 32),
}


def defaults_like(text: str) -> Defaults:
    """Return the default settings of another engine, expressed as our settings.

    Args:
        text: ENGINE[/GPU], such as vllm or sglang/b200.

    Raises:
        WrongValue: an engine or GPU that is not in the table; the message lists those that are.
    """
    name, _, gpu = text.strip().lower().partition("/")
    preset = PRESETS.get(name)
    if preset is None:
        raise _unknown(f"no engine is called {name!r}", PRESETS)
    known = [each for group in preset.gpu_classes for each in group.gpus]
    if gpu and gpu not in known:
        raise _unknown(f"{name} has no class for a GPU called {gpu!r}", known)
    chosen = next(each for each in preset.gpu_classes if not gpu or gpu in each.gpus)
    sizes: dict[str, KnobValue] = {
        "max_num_batched_tokens": chosen.max_num_batched_tokens,
        "max_num_seqs": chosen.max_num_seqs,
    }
    return Defaults(
        sizes | preset.knobs,
        {
            "block_size": preset.block_size,
            "token_capacity": max(8192, chosen.max_num_batched_tokens),
            "seq_capacity": max(256, chosen.max_num_seqs),
        },
    )


def _unknown(what: str, known: Collection[str]) -> WrongValue:
    there = f"; there are: {', '.join(known)}" if known else ""
    return WrongValue("bad_preset", f"--like: {what}{there}")
