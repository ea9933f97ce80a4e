"""OpenAI's requests as structs, with vLLM's additions.

A field declared here is used. `unused_fields` says what becomes of all others that are known. For
any other field, the request is refused with an error that names the field.
"""

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from stepscope.engine.http.errors import ApiError, from_validation, not_supported
from stepscope.engine.http.openai.unused_fields import UNUSED_FIELDS

_T = TypeVar("_T", bound=Struct)

MAX_CHOICES = 1024  # of one request: prompts times n

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=10_000_000)]
AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1, le=10_000_000)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """Fields that chat and completion requests share. `None`: the client did not send the field."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    min_tokens: Count | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None


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
    content: str | list[ContentPart] | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatTurn], Meta(min_length=1, max_length=10_000)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


def decode_completion(body: bytes) -> CompletionRequest:
    return _decode(body, CompletionRequest)


def decode_chat(body: bytes) -> ChatRequest:
    return _decode(body, ChatRequest)


def _decode(body: bytes, kind: type[_T]) -> _T:
    """Decode a request. Raises ApiError, which names the field, if one cannot be honoured."""
    try:
        fields = _decoder.decode(body)
        return msgspec.convert(_used(fields, kind, ""), kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise from_validation(error) from error


def _used(value: Any, kind: type[Struct], where: str) -> Any:
    """Return an object with the fields that `kind` has. Anything else is returned as it is.

    Args:
        where: the object's path, with a dot at its end.

    Raises:
        ApiError: another field asks for something.
    """
    if not isinstance(value, dict):
        return value
    used: dict[str, Any] = {}
    for name, each in value.items():
        if name in kind.__struct_fields__:
            inner = _NESTED.get(name)
            if inner is not None and isinstance(each, list):
                each = [_used(one, inner, f"{where}{name}[{at}].") for at, one in enumerate(each)]
            used[name] = each if inner is None else _used(each, inner, f"{where}{name}.")
        elif each is None:
            continue
        elif name == "add_special_tokens" and each is (kind is CompletionRequest):
            continue  # a chat template writes them itself
        elif (unused := UNUSED_FIELDS.get(name)) is None:
            raise ApiError(
                400,
                f"{where}{name}: there is no such field, or this server does not know it",
                param=f"{where}{name}",
                code="unknown_parameter",
            )
        elif unused.values is not None and _present(each) not in unused.values:
            raise not_supported(f"{where}{name}", each, unused.reason)
    return used


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if each is not None}
    return value


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
