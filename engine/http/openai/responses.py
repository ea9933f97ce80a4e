"""OpenAI's responses as structs, with vLLM's additions."""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatTopLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatDelta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str = ""


class ChatAnswer(Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta | UnsetType = UNSET  # in a chunk
    message: ChatAnswer | UnsetType = UNSET  # in a whole answer
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class OpenAIAnswer(Struct, frozen=True, kw_only=True):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: Sequence[CompletionChoice | ChatChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "stepscope"
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    with_tokens: bool = False  # telemetry subscribers and recordings get prompts and outputs


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
