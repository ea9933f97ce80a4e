"""`Preset`: the default settings of other engines (vLLM, SGLang, ...), expressed as our settings.

Presets differ by version and class of GPU. All these engines schedule a step while the step before
it runs, unless that is switched off.

Sources, from the code of the releases:
- vLLM 0.14, 0.20, 0.32 `EngineArgs.get_batch_defaults` (its API server) and `SchedulerConfig`.
- SGLang 0.5.23 `srt/arg_groups/memory_hook.py` (`chunked_prefill_size`),
  `srt/managers/schedule_policy.py` (prefill and decode in batches of their own unless
  `--enable-mixed-chunk`; blocks for the output are reserved), `srt/mem_cache/` (2,048 to 4,096
  running requests, by the memory for the KV cache).
- Mini-SGLang `scheduler/config.py` (`max_extend_tokens`), `engine/config.py` (`max_running_req`),
  `scheduler/prefill.py` (reserves prompt and output).
- TensorRT-LLM 1.x `TorchLlmArgs` and `SchedulerConfig` (GUARANTEED_NO_EVICT) of its documentation.
"""

from typing import NamedTuple

from stepscope.engine.protocol.settings.knobs import WrongValue
from stepscope.engine.protocol.wire import KnobValue


class GpuClass(NamedTuple):
    """The batch sizes that an engine chooses by default on the GPUs `gpus`, by their memory."""

    gpus: tuple[str, ...]
    max_num_batched_tokens: int
    max_num_seqs: int


class Preset(NamedTuple):
    """The default settings of one engine from version `since` on, expressed as our settings."""

    engine: str
    since: str
    gpu_classes: tuple[GpuClass, ...]  # the first one is the default
    knobs: dict[str, KnobValue]
    block_size: int

    @property
    def title(self) -> str:
        return f"{self.engine} {self.since}+"


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
_SGLANG: dict[str, KnobValue] = _VLLM | {"batching": "separate", "reserve": "output"}
_VLLM_PROMPT = _VLLM | {"reserve": "prompt"}
_TENSORRT = _VLLM | {"enable_chunked_prefill": False, "reserve": "output"}
_HUGE = GpuClass(("b200", "b300"), 16384, 1024)
_LARGE = GpuClass(("h100", "h200"), 8192, 1024)
_SMALL = GpuClass(("a100", "l40", "l4", "a10", "t4"), 2048, 256)

# The newest version of each engine first.
PRESETS = (
    Preset("vllm", "0.32", (_LARGE, _SMALL, _HUGE), _VLLM_PROMPT, 16),
    Preset("vllm", "0.20", (_LARGE, _SMALL), _VLLM_PROMPT, 16),
    Preset("vllm", "0.14", (_LARGE, _SMALL), _VLLM | {"reserve": "none"}, 16),
    # It reserves 0.7 of the output at first, and retracts when that was too little; it runs 2,048
    # to 4,096 requests, by the memory for the KV cache.
    Preset(
        "sglang",
        "0.5",
        (
            GpuClass(("h100", "h200", "a100", "h20"), 8192, 2048),
            GpuClass(("l40", "a10", "l4"), 4096, 2048),
            GpuClass(("t4",), 2048, 2048),
            GpuClass(("b200", "mi300"), 16384, 2048),
        ),
        _SGLANG,
        1,
    ),
    Preset("mini-sglang", "0.1", (GpuClass((), 8192, 256),), _SGLANG, 1),
    # It refuses a prompt above its max_num_tokens.
    Preset("tensorrt-llm", "1.0", (GpuClass((), 8192, 2048),), _TENSORRT, 32),
)
ENGINES = tuple(dict.fromkeys(preset.engine for preset in PRESETS))


def defaults_like(text: str) -> Defaults:
    """Return the default settings of another engine, expressed as our settings.

    Args:
        text: ENGINE[@VERSION][/GPU], such as vllm, vllm@0.20 or sglang/b200.

    Raises:
        WrongValue: an engine, version or GPU that is not in the table; the message lists those
            that are.
    """
    name, _, gpu = text.strip().lower().partition("/")
    name, _, version = name.partition("@")
    of_engine = [preset for preset in PRESETS if preset.engine == name]
    if not of_engine:
        raise _unknown(f"no engine is called {name!r}", ENGINES)
    wanted = _numbers(version)
    fitting = [each for each in of_engine if not version or _numbers(each.since) <= wanted]
    if not fitting:
        raise _unknown(
            f"nothing is known of {name} {version}", [f"{each.since}+" for each in of_engine]
        )
    preset = fitting[0]
    known = [each for group in preset.gpu_classes for each in group.gpus]
    if gpu and gpu not in known:
        raise _unknown(f"{preset.title} has no class for a GPU called {gpu!r}", known)
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


def _numbers(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.split(".")) if version else ()
    except ValueError:
        raise WrongValue("bad_preset", f"{version!r} is no version such as 0.32") from None


def _unknown(what: str, known: "tuple[str, ...] | list[str]") -> WrongValue:
    there = f"; there are: {', '.join(known)}" if known else ""
    return WrongValue("bad_preset", f"--like: {what}{there}")
