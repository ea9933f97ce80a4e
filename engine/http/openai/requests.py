"""OpenAI's requests as structs, with vLLM's additions.

Each request field is treated in one of three ways. A field declared here is honoured. A field in
`NO_OP_VALUES` is accepted, but only with a value that has no effect. For any other field, the
request is refused with an error that names the field.
"""

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from stepscope.engine.http.errors import ApiError, from_validation, not_supported

_T = TypeVar("_T")

MAX_CHOICES = 1024  # of one request: prompts times n
MAX_NO_OP_BYTES = 1024  # a longer value of such a field certainly has an effect

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=10_000_000)]
AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1, le=10_000_000)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]

# Fields that other servers honour and this one does not, each with the values that have no effect
# (null never has one).
NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "metadata": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # has no effect without tools
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """Fields that chat and completion requests share. `None`: the client did not send the field."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None
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


class ContentPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message's content.

    Only type `text` is supported. The other fields exist so that errors can name them.
    """

    type: str
    text: str | None = None
    refusal: Any = None
    image_url: Any = None
    video_url: Any = None
    audio_url: Any = None
    input_audio: Any = None
    file: Any = None


class ChatTurn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation.

    Fields after `content` must be empty. They are declared because clients send earlier answers
    back, which have these fields as null.
    """

    role: Annotated[str, Meta(min_length=1, max_length=256)]
    content: str | list[ContentPart] | None = None
    name: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_call_id: Any = None
    tool_calls: Any = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatTurn], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


_fields_decoder: msgspec.json.Decoder[dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw])
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Any)
_completion_decoder: msgspec.json.Decoder[CompletionRequest] = msgspec.json.Decoder(
    CompletionRequest
)
_chat_decoder: msgspec.json.Decoder[ChatRequest] = msgspec.json.Decoder(ChatRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """Decode the body of a completion request.

    Raises:
        ApiError: a field is invalid or unsupported. The error names the field.
    """
    _check_fields(body, CompletionRequest)
    return _decode(_completion_decoder, body)


def decode_chat(body: bytes) -> ChatRequest:
    """Decode the body of a chat request.

    Raises:
        ApiError: a field is invalid or unsupported. The error names the field.
    """
    _check_fields(body, ChatRequest)
    return _decode(_chat_decoder, body)


def _check_fields(body: bytes, kind: type[Struct]) -> None:
    """Raise ApiError for a field that is unknown, or whose value is not supported."""
    for name, raw in _decode(_fields_decoder, body).items():
        if name in kind.__struct_fields__:
            continue
        if name not in NO_OP_VALUES:
            raise ApiError(
                400,
                f"{name}: there is no such field, or this server does not know it",
                param=name,
                code="unknown_parameter",
            )
        text = bytes(raw)
        if len(text) > MAX_NO_OP_BYTES:  # too long to be a value without effect
            raise not_supported(name, text[:MAX_NO_OP_BYTES].decode(errors="replace"))
        value = _decode(_any_decoder, text)
        if value is not None and value not in NO_OP_VALUES[name]:
            raise not_supported(name, value)


def _decode(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise from_validation(error) from error
