"""`EngineConfig`: the settings of an engine at its start, and the capacity that bounds its knobs.

The command-line options, the config file and the documentation are made from its fields.
"""

import hashlib
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from stepscope.engine.protocol.knobs import ConfigError, doc

ModelImpl: TypeAlias = Literal["auto", "lean", "transformers"]
KVCacheDtype: TypeAlias = Literal["auto", "bf16", "fp8_e4m3"]
Role: TypeAlias = Literal["both", "prefill", "decode"]
MAX_LEVEL_MS = 1e9  # bound of a service level: no wait is that long


def _level(what: str) -> Meta:
    text = f"{what} is a breach, in ms (default: the watcher's level)"
    return doc(text, gt=0, le=MAX_LEVEL_MS)


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that stay fixed while an engine runs."""

    model: Annotated[
        str,
        doc(
            "'demo', 'smollm2' (small, trained; fetched once), a folder with a checkpoint, a GGUF "
            "file, a cached model, or random:NAME, a known shape with random weights (qwen3-8b)"
        ),
    ] = "demo"
    name: Annotated[str, doc("name of engine and sockets (default: engine-N, first free)")] = ""
    endpoint: Annotated[
        str, doc("control socket: ipc://PATH or tcp://HOST:PORT (default: in the runtime folder)")
    ] = ""
    keys: Annotated[
        str,
        doc("folder of authorised keys (default: that of the config folder for a public address)"),
    ] = ""
    device: Annotated[str, doc("'auto', 'cpu', 'cuda' or 'cuda:N'")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        doc("of weights, and of the KV cache unless kv_cache_dtype says otherwise"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDtype, doc("'fp8_e4m3': twice the blocks of bf16 at some accuracy; 'auto': as dtype")
    ] = "auto"
    model_impl: Annotated[
        ModelImpl,
        doc("our lean decoder (Llama, Qwen2/3, Mistral) or transformers' layers; 'auto': as fits"),
    ] = "auto"
    attention: Annotated[str, doc("backend: 'auto', or one that 'stepscope doctor' lists")] = "auto"
    block_size: Annotated[int, doc("tokens of one KV block", ge=1, le=256)] = 16
    kv_memory: Annotated[
        str,
        doc(
            "memory for the KV cache: a size (512MB), a share of what is free (20%), or 'auto': "
            "10% on a CPU, on a GPU what gpu_memory_utilization leaves"
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, doc("share of a GPU's memory for weights, steps and KV cache together", gt=0, le=1)
    ] = 0.9
    max_model_len: Annotated[int, doc("longest prompt and output (0: the model's limit)", ge=0)] = 0
    token_capacity: Annotated[
        int, doc("largest token budget to be set live (0: max_model_len, at least 8192)", ge=0)
    ] = 0
    seq_capacity: Annotated[int, doc("largest max_num_seqs to be set live", ge=1, le=65536)] = 256
    max_waiting: Annotated[int, doc("requests that may wait; one more is refused", ge=1)] = 100_000
    threads: Annotated[
        int, doc("CPU threads for the model (0: one or all cores, what is faster)", ge=0, le=1024)
    ] = 0
    overlap: Annotated[
        Literal["auto", "on", "off"],
        doc("prepare each step while the one before runs; 'auto': on a GPU; a CPU refuses 'on'"),
    ] = "auto"
    telemetry: Annotated[bool, doc("publish a record of every step")] = True
    replay_steps: Annotated[int, doc("messages kept for subscribers that miss some", ge=1)] = 20_000
    replay_memory: Annotated[str, doc("memory for these messages: a size (256MB)")] = "256MB"
    with_tokens: Annotated[
        bool, doc("put prompts and outputs into telemetry: all who watch or record see them")
    ] = False
    prefix_hashes: Annotated[
        bool,
        doc(
            "put a salted 64-bit hash of each KV block into telemetry: it shows which requests "
            "share a prefix, not their text; 'what-if' and 'tune' need it to foretell prefix hits"
        ),
    ] = False
    slo_ttft_ms: Annotated[float, _level("a first token that takes longer")] | None = None
    slo_itl_ms: Annotated[float, _level("a longer gap between two tokens")] | None = None
    seed: Annotated[int, doc("seed of sampled requests that bring none")] = 0
    role: Annotated[
        Role,
        doc(
            "'prefill' computes prompts and hands requests over to the engine of decode_to, "
            "'decode' takes only such requests, on the same machine; 'both': one engine does all"
        ),
    ] = "both"
    decode_to: Annotated[str, doc("name or address of the decode engine of a prefill engine")] = ""
    transfer_memory: Annotated[
        str, doc("shared memory for handing over: a size, or 'auto': two longest requests")
    ] = "auto"

    def overlaps(self, *, launch_blocks: bool) -> bool:
        """Whether each step is prepared while the step before it runs.

        `launch_blocks`: whether launching a step takes until the device has run it, as on a CPU.

        Raises ConfigError: `overlap` is "on", but this device or role cannot overlap steps.
        """
        why = None
        if launch_blocks:
            why = "overlap: a CPU runs the model within the launch, so nothing can overlap"
        elif self.role != "both":
            why = f"overlap does not go with role={self.role}"
        if self.overlap == "on" and why is not None:
            raise ConfigError("overlap", f"{why}; use --overlap auto")
        return self.overlap != "off" and why is None

    def hash(self) -> str:
        """Return a short fingerprint of the whole configuration, for telling recordings apart."""
        run = {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if not name.startswith("slo_")  # they judge a run, and do not change it
        }
        return hashlib.sha256(msgspec.json.encode(run, order="sorted")).hexdigest()[:12]
