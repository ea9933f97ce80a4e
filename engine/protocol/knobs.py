"""`Knobs`: the settings that may change between two steps while an engine runs.

The command-line options, the config file, the `KnobSpec`s on the wire and the documentation are
made from its fields.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct

from stepscope.engine.protocol.wire import KnobSpec, KnobValue


class ConfigError(ValueError):
    """Raised when a setting is refused."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class WrongValue(ConfigError):  # noqa: N818 - reads as what happened
    """Raised for a value in the wrong form for its setting; it would be wrong on every machine."""


def doc(description: str, **bounds: Any) -> Meta:
    """Describe a setting and its bounds, for its option, the config file and the documentation."""
    return Meta(description=description, **bounds)


Batching: TypeAlias = Literal["naive", "static", "continuous", "separate", "chunked"]
Order: TypeAlias = Literal["decode_first", "arrival"]
Policy: TypeAlias = Literal["fcfs", "priority"]
Reserve: TypeAlias = Literal["none", "prompt", "output"]
Speculative: TypeAlias = Literal["off", "ngram"]


class Limits(Struct, frozen=True, kw_only=True):
    """Upper bounds of the knobs, fixed once the model is loaded."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


class Knobs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings that may change between two steps; named as in vLLM where it has them."""

    max_num_batched_tokens: Annotated[int, doc("token budget of one step", ge=1)] = 2048
    max_num_seqs: Annotated[
        int, doc("requests running at once; lowering it drains, never kills", ge=1)
    ] = 256
    enable_chunked_prefill: Annotated[
        bool, doc("off: a prompt is prefilled whole in one step, or waits")
    ] = True
    long_prefill_token_threshold: Annotated[
        int, doc("most tokens one prompt gets in a step beside others (0: no limit)", ge=0)
    ] = 0
    batching: Annotated[
        Batching,
        doc("what shares a step: one, a padded batch, whole prompts, chunks or decodes, or both"),
    ] = "chunked"
    order: Annotated[
        Order, doc("decodes before prefill chunks (Sarathi-Serve), or by arrival (vLLM v1)")
    ] = "decode_first"
    policy: Annotated[Policy, doc("which request is admitted first and preempted last")] = "fcfs"
    reserve: Annotated[
        Reserve,
        doc(
            "KV blocks that must be free before a request is admitted: for its first chunk, for "
            "its whole prompt, or for its output too (then nothing is preempted)"
        ),
    ] = "prompt"
    enable_prefix_caching: Annotated[bool, doc("reuse KV blocks of equal prompt beginnings")] = True
    watermark: Annotated[
        float, doc("share of the KV blocks that admission leaves free", ge=0.0, le=0.5)
    ] = 0.0
    speculative: Annotated[
        Speculative,
        doc("guess tokens from the request's own text (prompt lookup); check them in one pass"),
    ] = "off"
    num_speculative_tokens: Annotated[
        int, doc("tokens guessed for one request in a step, at most", ge=1, le=64)
    ] = 5
    prompt_lookup_min: Annotated[
        int, doc("shortest repetition (tokens) that a guess follows", ge=1, le=16)
    ] = 5
    prompt_lookup_max: Annotated[
        int, doc("longest repetition (tokens) that is tried; then shorter ones", ge=1, le=16)
    ] = 5
    prefill_schedule_interval: Annotated[
        int, doc("beside decodes only every Nth step takes prefills, unless the queue grows", ge=1)
    ] = 1

    def changed(self, changes: Mapping[str, KnobValue], limits: Limits) -> "Knobs":
        """Return these knobs with `changes`. Raises ConfigError: one is wrong, or they clash."""
        values = msgspec.structs.asdict(self)
        for name in changes:
            if name not in values:
                known = ", ".join(values)
                raise ConfigError("unknown_knob", f"no knob is called {name!r}; there are: {known}")
        values |= changes
        values = {spec.name: checked(spec, values[spec.name]) for spec in knob_specs(limits)}
        knobs = Knobs(**values)
        knobs.check(limits)
        return knobs

    def check(self, limits: Limits) -> None:
        """Raise ConfigError when the values do not go together or exceed the capacity."""
        for spec in knob_specs(limits):
            checked(spec, getattr(self, spec.name))
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < limits.max_model_len:
            raise ConfigError(
                "out_of_bounds",
                "whole prompts need max_num_batched_tokens of at least "
                f"max_model_len={limits.max_model_len}, not {self.max_num_batched_tokens}; "
                "or set enable_chunked_prefill=true with it",
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                "out_of_bounds",
                f"prompt_lookup_min={self.prompt_lookup_min} must be at most "
                f"prompt_lookup_max={self.prompt_lookup_max}: set these two together",
            )
        if self.speculative != "off" and self.batching == "static":
            raise ConfigError(
                "out_of_bounds",
                f"speculative={self.speculative} does not go with batching=static, whose requests "
                "all get one token a step: use batching=chunked, or speculative=off",
            )

    def as_dict(self) -> dict[str, KnobValue]:
        return msgspec.structs.asdict(self)


_KINDS = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
}
# The field of `Limits` that bounds a knob, by the knob's name.
_CAPACITIES = {
    "max_num_batched_tokens": "max_num_batched_tokens",
    "long_prefill_token_threshold": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
}


@lru_cache(maxsize=32)
def knob_specs(limits: Limits) -> tuple[KnobSpec, ...]:
    return tuple(_spec(field, limits) for field in msgspec.structs.fields(Knobs))


def _spec(field: msgspec.structs.FieldInfo, limits: Limits) -> KnobSpec:
    base, meta = get_args(field.type)
    choices = get_args(base)
    high: float | None = meta.le
    if capacity := _CAPACITIES.get(field.name):
        high = getattr(limits, capacity)
    return KnobSpec(
        name=field.name,
        kind="choice" if choices else base.__name__,
        default=field.default,
        low=meta.ge,
        high=high,
        choices=choices,
        help=meta.description,
    )


def typed(spec: KnobSpec, text: str) -> KnobValue:
    """Return the value that a person typed for a knob. Raises ValueError: it is none."""
    if spec.kind == "bool":
        return ("off", "false", "on", "true").index(text.lower()) > 1
    return text if spec.kind == "choice" else _KINDS[spec.kind][0](text)


def checked(spec: KnobSpec, value: KnobValue) -> KnobValue:
    """Return a value in the type of its knob. Raises ConfigError if the knob does not take it."""
    name = spec.name
    if spec.kind == "choice":
        if value not in spec.choices:
            what = f"{name} is one of {', '.join(spec.choices)}, not {value!r}"
            raise ConfigError("out_of_bounds", what)
        return value
    if spec.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    expected, called = _KINDS[spec.kind]
    if type(value) is not expected:
        raise ConfigError("wrong_type", f"{name} takes {called}, not {value!r}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low = spec.low if spec.low is not None else value
        high = spec.high if spec.high is not None else max(low, value)
        if not low <= value <= high:
            bounds = (
                f"between {low:g} and {high:g}" if spec.high is not None else f"{low:g} or more"
            )
            raise ConfigError("out_of_bounds", f"{name} must be {bounds}, not {value!r}")
    return value
