"""What an engine is started with (`EngineConfig`) and what may change while it runs (`Knobs`).

`EngineConfig` is frozen at start: it is the capacity the knobs live in. The two tables here make
the command-line options, the config file, the `KnobSpec`s on the wire and the documentation.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct

from stepscope.engine.protocol.wire import KnobSpec, KnobValue

ModelImpl: TypeAlias = Literal["auto", "lean", "transformers"]
Batching: TypeAlias = Literal["naive", "static", "continuous", "separate", "chunked"]
Order: TypeAlias = Literal["decode_first", "arrival"]
Policy: TypeAlias = Literal["fcfs", "priority"]
Reserve: TypeAlias = Literal["none", "prompt", "output"]
KVCacheDtype: TypeAlias = Literal["auto", "bf16", "fp8_e4m3"]
Speculative: TypeAlias = Literal["off", "ngram"]
Role: TypeAlias = Literal["both", "prefill", "decode"]


class ConfigError(ValueError):
    """A setting that cannot be. `code` is for programs, the message says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class WrongValue(ConfigError):  # noqa: N818 - reads as what happened
    """What no machine would take: it is not of the form that the setting has."""


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is fixed for the life of an engine."""

    model: Annotated[
        str,
        Meta(
            description="'demo', 'smollm2' (it speaks; fetched once), a folder with a checkpoint, "
            "a GGUF file, the name of a cached one, or random:NAME, a well-known shape with random "
            "weights (random:qwen3-8b)"
        ),
    ] = "demo"
    name: Annotated[
        str,
        Meta(description="name of this engine, and of its sockets (default: engine-N, first free)"),
    ] = ""
    endpoint: Annotated[
        str,
        Meta(
            description="control socket: ipc://PATH or tcp://127.0.0.1:PORT "
            "(default: the user's runtime folder); telemetry uses PATH.telemetry or PORT + 1"
        ),
    ] = ""
    keys: Annotated[
        str,
        Meta(
            description="folder of the keys that are let in ('stepscope keys'); a public address "
            "always asks for keys (default: then that of the config folder, else none)"
        ),
    ] = ""
    device: Annotated[str, Meta(description="'auto', 'cpu', 'cuda' or 'cuda:N'")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="of weights, and of the KV cache unless kv_cache_dtype says otherwise"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Meta(
            description="of the KV cache; 'fp8_e4m3' takes half the memory of bf16, so that twice "
            "the blocks fit, and costs some accuracy; 'auto': as dtype"
        ),
    ] = "auto"
    model_impl: Annotated[
        ModelImpl,
        Meta(
            description="whose layers run: our lean decoder (Llama, Qwen2, Qwen3, Mistral) or "
            "those of transformers; 'auto' takes the lean one where it fits"
        ),
    ] = "auto"
    attention: Annotated[
        str, Meta(description="attention backend, 'auto' picks one ('stepscope doctor' lists them)")
    ] = "auto"
    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens of one KV block")] = 16
    kv_memory: Annotated[
        str,
        Meta(
            description="memory for the KV cache: a size (512MB), a share of what is free (20%), "
            "or 'auto': 10% on a CPU, on a GPU what gpu_memory_utilization leaves"
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of a GPU's memory for weights, steps and KV cache together",
        ),
    ] = 0.9
    max_model_len: Annotated[
        int, Meta(ge=0, description="longest request, prompt and output (0: the model's own limit)")
    ] = 0
    token_capacity: Annotated[
        int,
        Meta(
            ge=0,
            description="largest token budget that can be set live "
            "(0: max_model_len, at least 8192)",
        ),
    ] = 0
    seq_capacity: Annotated[
        int, Meta(ge=1, le=65536, description="largest max_num_seqs that can be set live")
    ] = 256
    max_waiting: Annotated[
        int, Meta(ge=1, description="requests that may wait; a further one is refused")
    ] = 100_000
    threads: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="CPU threads for the model (0: one or all cores, whichever is faster)",
        ),
    ] = 0
    overlap: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="prepare each step while the one before it runs, where its tokens are not "
            "needed for that; 'auto': on a GPU; 'on' is refused on a CPU, which runs the model "
            "within the launch"
        ),
    ] = "auto"
    telemetry: Annotated[bool, Meta(description="publish a record of every step")] = True
    replay_steps: Annotated[
        int, Meta(ge=1, description="messages kept to heal gaps of slow subscribers")
    ] = 20_000
    replay_memory: Annotated[
        str, Meta(description="... and what they may take up: a size (256MB)")
    ] = "256MB"
    with_tokens: Annotated[
        bool,
        Meta(
            description="put prompts and outputs (token ids and text) into telemetry: everyone who "
            "watches or records sees them"
        ),
    ] = False
    prefix_hashes: Annotated[
        bool,
        Meta(
            description="put a salted 64-bit hash of each KV block of prompts and outputs into "
            "telemetry: which ones begin alike, not what they say; 'what-if' and 'diagnose' need "
            "it to foretell prefix hits"
        ),
    ] = False
    seed: Annotated[int, Meta(description="seed of sampled requests that bring none")] = 0
    role: Annotated[
        Role,
        Meta(
            description="'prefill' computes prompts and hands requests over to the engine of "
            "decode_to, 'decode' takes only such requests, on the same machine; 'both': one engine "
            "does all"
        ),
    ] = "both"
    decode_to: Annotated[
        str, Meta(description="name or address of the decode engine of a prefill engine")
    ] = ""
    transfer_memory: Annotated[
        str,
        Meta(
            description="shared memory for what a prefill engine hands over: a size (512MB), or "
            "'auto': twice the longest request"
        ),
    ] = "auto"

    def overlaps(self, *, launch_blocks: bool) -> bool:
        """Whether steps are prepared while those before them run.

        Args:
            launch_blocks: of the device: a step has run once it is launched.

        Raises:
            ConfigError: it is asked for where it cannot be.
        """
        if self.overlap == "on" and launch_blocks:
            raise ConfigError(
                "overlap",
                "overlap: a CPU runs the model within the launch, so nothing can overlap; "
                "use --overlap auto",
            )
        if self.overlap == "on" and self.role != "both":
            raise ConfigError(
                "overlap", f"overlap does not go with role={self.role}; use --overlap auto"
            )
        return self.overlap != "off" and self.role == "both" and not launch_blocks

    def hash(self) -> str:
        """Short fingerprint of the whole configuration, for telling recordings apart."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:12]


class Limits(Struct, frozen=True, kw_only=True):
    """Upper bounds of the knobs, known once the model is loaded."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


class Knobs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may change between two steps. Names are vLLM's where it has one."""

    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="token budget of one step")] = (
        2048
    )
    max_num_seqs: Annotated[
        int, Meta(ge=1, description="requests running at once; lowering it drains, never kills")
    ] = 256
    enable_chunked_prefill: Annotated[
        bool, Meta(description="off: a prompt is prefilled whole in one step, or waits")
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        Meta(ge=0, description="most tokens one prompt gets in a step beside others (0: no limit)"),
    ] = 0
    batching: Annotated[
        Batching,
        Meta(
            description="who shares a step: one request, a padded batch, whole prompts, "
            "chunks or decodes, or both"
        ),
    ] = "chunked"
    order: Annotated[
        Order,
        Meta(description="decodes before prefill chunks (Sarathi-Serve), or by arrival (vLLM v1)"),
    ] = "decode_first"
    policy: Annotated[Policy, Meta(description="who waits first, and who is preempted last")] = (
        "fcfs"
    )
    reserve: Annotated[
        Reserve,
        Meta(
            description="KV blocks that must be free before a request is admitted: for its first "
            "chunk, for its whole prompt, or for its output too (then nothing is preempted)"
        ),
    ] = "prompt"
    enable_prefix_caching: Annotated[
        bool, Meta(description="reuse the KV blocks of equal prompt beginnings")
    ] = True
    watermark: Annotated[
        float, Meta(ge=0.0, le=0.5, description="share of the KV blocks that admission leaves free")
    ] = 0.0
    speculative: Annotated[
        Speculative,
        Meta(
            description="guess tokens from the request's own text (prompt lookup) and check "
            "them in the same forward pass"
        ),
    ] = "off"
    num_speculative_tokens: Annotated[
        int, Meta(ge=1, le=64, description="tokens guessed for one request in a step, at most")
    ] = 5
    prompt_lookup_min: Annotated[
        int, Meta(ge=1, le=16, description="shortest repetition (tokens) that a guess follows")
    ] = 5
    prompt_lookup_max: Annotated[
        int, Meta(ge=1, le=16, description="longest one, tried first; then shorter ones")
    ] = 5

    def changed(self, changes: Mapping[str, KnobValue], limits: Limits) -> "Knobs":
        """These knobs with `changes` applied.

        Raises:
            ConfigError: an unknown name, a wrong type, a value outside its bounds, or values that
                do not go together. Nothing is changed then.
        """
        values = msgspec.structs.asdict(self)
        for name, value in changes.items():
            if name not in values:
                known = ", ".join(values)
                raise ConfigError("unknown_knob", f"no knob is called {name!r}; there are: {known}")
            values[name] = _checked(name, value, limits)
        knobs = Knobs(**values)
        knobs.check(limits)
        return knobs

    def check(self, limits: Limits) -> None:
        """Raises ConfigError when the values do not go together or exceed the capacity."""
        for name, value in msgspec.structs.asdict(self).items():
            _checked(name, value, limits)
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < limits.max_model_len:
            raise ConfigError(
                "out_of_bounds",
                "enable_chunked_prefill=false prefills every prompt in one step, so "
                f"max_num_batched_tokens must be at least max_model_len={limits.max_model_len}, "
                f"not {self.max_num_batched_tokens}: set both together",
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                "out_of_bounds",
                f"prompt_lookup_min={self.prompt_lookup_min} must be at most "
                f"prompt_lookup_max={self.prompt_lookup_max}: set both together",
            )
        if self.speculative != "off" and self.batching == "static":
            raise ConfigError(
                "out_of_bounds",
                f"speculative={self.speculative} does not go with batching=static, whose requests "
                "all get one token a step: use batching=chunked, or speculative=off",
            )

    def as_dict(self) -> dict[str, KnobValue]:
        return msgspec.structs.asdict(self)


def knob_specs(limits: Limits) -> tuple[KnobSpec, ...]:
    """The knobs with the bounds this engine gives them."""
    return tuple(_spec(field, limits) for field in msgspec.structs.fields(Knobs))


def _spec(field: msgspec.structs.FieldInfo, limits: Limits) -> KnobSpec:
    base, meta = get_args(field.type)
    choices = get_args(base)
    high: float | None = meta.le
    if field.name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        high = limits.max_num_batched_tokens
    elif field.name == "max_num_seqs":
        high = limits.max_num_seqs
    kinds: dict[object, Literal["int", "float", "bool"]] = {
        int: "int",
        float: "float",
        bool: "bool",
    }
    return KnobSpec(
        name=field.name,
        kind="choice" if choices else kinds[base],
        default=field.default,
        low=meta.ge,
        high=high,
        choices=choices,
        help=meta.description,
    )


def _checked(name: str, value: KnobValue, limits: Limits) -> KnobValue:
    spec = next(s for s in knob_specs(limits) if s.name == name)
    if spec.kind == "choice":
        if value not in spec.choices:
            raise ConfigError(
                "out_of_bounds", f"{name} is one of {', '.join(spec.choices)}, not {value!r}"
            )
        return value
    if spec.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    expected = {"int": int, "float": float, "bool": bool}[spec.kind]
    if type(value) is not expected:
        raise ConfigError("wrong_type", f"{name} takes {_article(spec)}, not {value!r}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low = spec.low if spec.low is not None else value
        high = spec.high if spec.high is not None else value
        if not low <= value <= high:
            raise ConfigError(
                "out_of_bounds", f"{name} must be between {low:g} and {high:g}, not {value!r}"
            )
    return value


def _article(spec: KnobSpec) -> str:
    return {"int": "a whole number", "float": "a number", "bool": "true or false"}[spec.kind]
