"""OpenAI's requests as structs, with vLLM's additions, and how a request's body is read.

A field declared here is used. Any other is taken if it changes no answer, or its value asks for
nothing; else the request is refused with an error that names the field. A body's size and time are
limited.
"""

import asyncio
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.types import Receive

from stepscope.engine.http.errors import ApiError, from_validation, not_supported
from stepscope.engine.protocol.commands import MAX_COMMAND_BYTES
from stepscope.engine.protocol.sampling_params import TokenId

# Fields of OpenAI, vLLM and llama.cpp that change no answer, or say more about others of this kind.
IGNORED_FIELDS = {
    name
    for names in (
        "prompt_cache_key prompt_cache_options prompt_cache_retention prompt_cache_breakpoint",
        "safety_identifier metadata prediction parallel_tool_calls session_id cache_control",
        "guided_decoding_backend guided_whitespace_pattern return_mm_kwargs truncation_side",
        "routed_experts_prompt_start spaces_between_special_tokens",
        "cache_prompt n_cache_reuse id_slot n_keep n_discard backend_sampling sse_ping_interval",
        "parse_tool_calls dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
        "xtc_threshold dynatemp_exponent mirostat_tau mirostat_eta adaptive_decay",
    )
    for name in names.split()
}
# Values that ask for nothing, where they are not false, "", [] or {}.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    name: values
    for names, values in (
        ("tool_choice function_call", ("none", "auto")),
        ("response_format", ({"type": "text"},)),
        ("modalities", (["text"],)),
        ("add_generation_prompt include_reasoning skip_special_tokens", (True,)),
        ("verbosity", ("medium",)),
        ("reasoning_format", ("none",)),
        ("service_tier", ("auto", "default")),
        ("best_of length_penalty n_cmpl repeat_penalty stream_interval typical_p", (1,)),
        ("adaptive_target reasoning_budget_tokens repeat_last_n thinking_token_budget", (-1,)),
        ("top_n_sigma", (-1,)),
        ("dry_multiplier dynatemp_range min_keep mirostat n_probs xtc_probability", (0,)),
        ("t_max_predict_ms", (-1, 0)),
    )
    for name in names.split()
}

_T = TypeVar("_T", bound=Struct)

StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=10_000_000)]
AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1, le=10_000_000)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """Fields that chat and completion requests share, with OpenAI's defaults."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    min_tokens: Count = 0
    stop: StopString | Annotated[tuple[StopString, ...], Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0  # 0, -1: all
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    user: Annotated[str, Meta(max_length=256)] = ""


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class ContentPart(Struct, frozen=True, kw_only=True):
    """A part of a message's content. Only type `text` is supported."""

    type: str
    text: str | None = None


class ChatTurn(Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=256)]
    content: str | list[ContentPart]


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatTurn], Meta(min_length=1, max_length=10_000)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0


def decode(body: bytes, kind: type[_T]) -> _T:
    """Return the request in a body. Raises ApiError if it is malformed, or asks for too much."""
    try:
        fields = _decoder.decode(body)
        return msgspec.convert(_used(fields, kind, ""), kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise from_validation(error) from error


def _used(value: Any, kind: type[Struct], where: str) -> Any:
    """Return an object with the fields that `kind` has. Anything else is returned as it is.

    `where`: its path, with a dot at its end. Raises ApiError: another field asks for something.
    """
    if not isinstance(value, dict):
        return value
    used: dict[str, Any] = {}
    for name, each in value.items():
        if each is None:
            continue
        if name in kind.__struct_fields__:
            inner = _NESTED.get(name)
            if inner is not None and isinstance(each, list):
                each = [_used(one, inner, f"{where}{name}[{at}].") for at, one in enumerate(each)]
            used[name] = each if inner is None else _used(each, inner, f"{where}{name}.")
        elif not _asks_for_nothing(name, each, kind):
            reason = "this server does not know it, or cannot do it"
            raise not_supported(f"{where}{name}", each, reason)
    return used


def _asks_for_nothing(name: str, value: Any, kind: type[Struct]) -> bool:
    if name == "add_special_tokens":
        return value is (kind is CompletionRequest)  # a chat template writes them itself
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
    if name in NEUTRAL_VALUES:
        return value in NEUTRAL_VALUES[name]
    return name in IGNORED_FIELDS or value is False or value in ("", [], {})


def _number(literal: str) -> int | float:
    """Return an integer also for 16.0, as some clients write integers."""
    value = float(literal)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


_NESTED: dict[str, type[Struct]] = {
    "messages": ChatTurn,
    "content": ContentPart,
    "stream_options": StreamOptions,
}
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(float_hook=_number)


# The decoded request must fit into one command.
MAX_BODY_BYTES = MAX_COMMAND_BYTES - 64 * 1024
BODY_TIMEOUT_S = 30.0


class ClientGone(Exception):  # noqa: N818 - reads as what happened
    """The client has disconnected."""


async def read_body(receive: Receive) -> bytes:
    """Return the whole body. Many clients read no answer before its end, however long it is.

    Raises:
        ApiError: the body is too long, or takes too long to arrive.
        ClientGone: the client disconnected.
    """
    body = bytearray()
    num_bytes, more = 0, True
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                num_bytes += len(message.get("body", b""))
                more = message.get("more_body", False)
                if num_bytes <= MAX_BODY_BYTES:
                    body += message.get("body", b"")
    except TimeoutError:
        what = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, what, code="timeout") from None
    if num_bytes > MAX_BODY_BYTES:
        what = f"the body is longer than {MAX_BODY_BYTES} bytes; send a shorter prompt"
        raise ApiError(413, what, code="request_too_large")
    return bytes(body)
