"""OpenAI's requests as structs, with vLLM's additions, and how a request's body is read.

A field declared here is used. `UNUSED_FIELDS` says what becomes of all others that are known. For
any other field, the request is refused with an error that names the field. A body's size and time
are limited.
"""

import asyncio
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.types import Receive

from stepscope.engine.http.errors import ApiError, from_validation, not_supported
from stepscope.engine.protocol.commands import MAX_COMMAND_BYTES


class UnusedField(NamedTuple):
    """Why a field is not used, and the values that ask for nothing; None: no value asks for any."""

    reason: str
    values: tuple[Any, ...] | None


_SAME = "it does not change the answer"
_TOOLS = "models here call no tools"
_FORM = "nothing here makes the text keep to a form"
_MESSAGE = "a message is a role and a text"
_MEDIA = "text is all that goes in and out"
_TEMPLATE = "the prompt is made of the messages, by the model's own chat template"
_THOUGHTS = "the model alone decides how long it thinks, and its thoughts are part of the text"
_SAMPLING = "there is no such way of sampling"
_SHOWN = "the answer does not show it"

# fmt: off
_ROWS: tuple[tuple[str, tuple[Any, ...] | None, str], ...] = (
    ("prompt_cache_key prompt_cache_options prompt_cache_retention cache_prompt", None, _SAME),
    ("n_cache_reuse id_slot session_id safety_identifier metadata prediction", None, _SAME),
    ("backend_sampling sse_ping_interval", None, _SAME),
    # They say more about other fields, which are not used either.
    ("parallel_tool_calls parse_tool_calls", None, _TOOLS),
    ("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", None, _SAMPLING),
    ("xtc_threshold dynatemp_exponent mirostat_tau mirostat_eta adaptive_decay", None, _SAMPLING),
    ("guided_decoding_backend guided_whitespace_pattern", None, _FORM),
    ("spaces_between_special_tokens return_mm_kwargs routed_experts_prompt_start", None, _SHOWN),
    ("truncation_side n_keep n_discard", None, "a prompt is taken whole or refused"),
    ("tools functions", ([],), _TOOLS),
    ("tool_choice function_call", ("none", "auto"), _TOOLS),
    ("web_search_options", (), _TOOLS),
    ("response_format", ({"type": "text"},), _FORM),
    ("structured_outputs", ({},), _FORM),
    ("guided_json guided_regex guided_choice guided_grammar", (), _FORM),
    ("json_schema grammar grammar_triggers preserved_tokens", ("", []), _FORM),
    ("grammar_lazy n_indent", (False,), _FORM),
    ("modalities", (["text"],), _MEDIA),
    ("audio prompt_embeds multimodal_data mm_processor_kwargs media_io_kwargs", ({},), _MEDIA),
    ("add_generation_prompt", (True,), _TEMPLATE),
    ("continue_final_message", (False,), _TEMPLATE),
    ("chat_template generation_prompt chat_template_kwargs documents", ({}, [], ""), _TEMPLATE),
    ("reasoning_effort", (), _THOUGHTS),
    ("verbosity", ("medium",), _THOUGHTS),
    ("thinking_token_budget reasoning_budget_tokens", (-1,), _THOUGHTS),
    ("include_reasoning", (True,), _THOUGHTS),
    ("reasoning_format", ("none",), _THOUGHTS),
    ("reasoning_control thinking_forced_open", (False,), _THOUGHTS),
    ("logit_bias bad_words", ({}, []), _SAMPLING),
    ("allowed_token_ids samplers repetition_detection", (), _SAMPLING),
    ("use_beam_search early_stopping watermarking", (False,), _SAMPLING),
    ("best_of length_penalty typical_p", (1,), _SAMPLING),
    ("top_n_sigma adaptive_target", (-1,), _SAMPLING),
    ("xtc_probability dry_multiplier mirostat dynatemp_range min_keep", (0,), _SAMPLING),
    ("repeat_last_n", (-1,), "penalties count all tokens of the request"),
    ("echo return_token_ids return_tokens return_tokens_as_token_ids", (False,), _SHOWN),
    ("return_token_offsets return_prompt_text return_progress verbose", (False,), _SHOWN),
    ("timings_per_token post_sampling_probs", (False,), _SHOWN),
    ("prompt_logprobs logprob_token_ids", (), _SHOWN),
    ("skip_special_tokens", (True,), _SHOWN),
    ("response_fields", ([],), _SHOWN),
    ("truncate_prompt_tokens suffix", ("",), "a prompt is taken whole or refused"),
    ("store", (False,), "this server keeps no answers"),
    ("moderation", (), "this server checks no contents"),
    ("service_tier", ("auto", "default"), "requests differ in their priority only"),
    ("cache_salt", (), "all requests share one prefix cache"),
    ("kv_transfer_params ec_transfer_params", ({},), "nothing is handed to other servers"),
    ("vllm_xargs lora", ({}, []), "there is no extension to read it"),
    ("stream_interval", (1,), "the tokens of each step are sent at once"),
    ("t_max_predict_ms", (-1, 0), "a time limit is the client's"),
    # Of messages, their parts, and the options of streams.
    ("name refusal annotations reasoning reasoning_content", ("", []), _MESSAGE),
    ("tool_call_id tool_calls", ("", []), _MESSAGE),
    ("image_url video_url audio_url input_audio file", ({}, ""), _MEDIA),
    ("cache_control prompt_cache_breakpoint", None, _SAME),
    ("include_obfuscation", (False,), "no chunk is padded"),
    # Other names of what there is.
    ("n_predict", (), "its name is max_tokens"),
    ("n_cmpl", (1,), "its name is n"),
    ("repeat_penalty", (1,), "its name is repetition_penalty"),
    ("n_probs", (0,), "its name is logprobs"),
    ("request_id", (), "it is read from the header x-request-id"),
)
# fmt: on

UNUSED_FIELDS = {
    name: UnusedField(reason, values) for names, values, reason in _ROWS for name in names.split()
}


_T = TypeVar("_T", bound=Struct)

MAX_CHOICES = 1024  # of one request: prompts times n

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
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

    Args:
        where: the object's path, with a dot at its end.

    Raises ApiError: another field asks for something.
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
        elif name == "add_special_tokens" and each is (kind is CompletionRequest):
            continue  # a chat template writes them itself
        elif (unused := UNUSED_FIELDS.get(name)) is None:
            message = f"{where}{name}: there is no such field, or this server does not know it"
            raise ApiError(400, message, param=f"{where}{name}", code="unknown_parameter")
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


# The decoded request must fit into one command.
MAX_BODY_BYTES = MAX_COMMAND_BYTES - 64 * 1024
BODY_TIMEOUT_S = 30.0


class ClientGone(Exception):  # noqa: N818 - reads as what happened
    """The client has disconnected."""


async def read_body(receive: Receive) -> bytes:
    """Return the whole body.

    One that is too long is read to its end, because many clients read no answer before it.

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
                else:
                    body.clear()
    except TimeoutError:
        what = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, what, code="timeout") from None
    if num_bytes > MAX_BODY_BYTES:
        what = f"the body is longer than {MAX_BODY_BYTES} bytes; send a shorter prompt"
        raise ApiError(413, what, code="request_too_large")
    return bytes(body)
