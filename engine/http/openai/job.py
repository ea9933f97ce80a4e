"""`Job`: one HTTP request as commands for the engine, with the `Writer` of its answer (structs)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from stepscope.engine.http.errors import invalid
from stepscope.engine.http.openai.generation import TextPiece
from stepscope.engine.http.openai.requests import MAX_CHOICES, GenerationRequest
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Output
from stepscope.engine.protocol.settings.sampling_params import SamplingParams


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


_LARGEST_SEED = 2**63 - 1
_SAME_NAMES = set(SamplingParams.__struct_fields__) - {"logprobs"}
_encoder = msgspec.json.Encoder()


class Head(NamedTuple):
    """The fields that every response and every chunk of a stream has."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str | None


class Writer:
    """Writes the JSON of answers and of the chunks of streamed ones.

    Args:
        kinds: `object` of a chunk, and of a whole answer.
        choice: makes a choice from its index and an output; the last argument is True in a chunk.
    """

    def __init__(
        self,
        head: Head,
        kinds: tuple[str, str],
        choice: Callable[[int, Output, bool], ChatChoice | CompletionChoice],
    ) -> None:
        self._head = head._asdict()
        self._kinds = kinds
        self._choice = choice

    def chunk(self, piece: TextPiece, usage: Usage | UnsetType | None) -> bytes:
        choice = self._choice(piece.choice, piece.output, True)
        return self._write(self._kinds[0], [choice], usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the last chunk of a stream. It has the usage and no choices."""
        return self._write(self._kinds[0], [], usage)

    def whole(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """Return the answer to a request that does not stream. `outputs`: one for each choice."""
        choices = [self._choice(index, output, False) for index, output in enumerate(outputs)]
        return self._write(self._kinds[1], choices, usage)

    def _write(
        self,
        kind: str,
        choices: Sequence[ChatChoice | CompletionChoice],
        usage: Usage | UnsetType | None,
    ) -> bytes:
        return _encoder.encode(
            OpenAIAnswer(**self._head, object=kind, choices=choices, usage=usage)
        )


class Job(NamedTuple):
    submits: list[Submit]  # choices of the first prompt, then of the second, ...
    num_choices: int  # of each prompt
    stream: bool
    include_usage: bool
    continuous_usage: bool
    writer: Writer


def make_job(
    request: GenerationRequest, head: Head, prompts: Sequence[Submit], writer: Writer
) -> Job:
    """Return the job of a request. Raises ApiError if it asks for too many choices."""
    check_choices(request, len(prompts))
    submits = [
        msgspec.structs.replace(
            prompt,
            client_id=request.user or head.id,
            sampling=_of_choice(prompt.sampling, choice),
            priority=request.priority,
            stream=request.stream,
        )
        for prompt in prompts
        for choice in range(request.n)
    ]
    usage = request.stream_options
    return Job(
        submits=submits,
        num_choices=request.n,
        stream=request.stream,
        include_usage=usage.include_usage,
        continuous_usage=usage.include_usage and usage.continuous_usage_stats,
        writer=writer,
    )


def check_choices(request: GenerationRequest, num_prompts: int) -> None:
    """Raise ApiError for too many choices in total, or for stream options without a stream."""
    if num_prompts * request.n > MAX_CHOICES:
        raise invalid(
            "n",
            f"{num_prompts} prompts times n={request.n} are more than the {MAX_CHOICES} choices "
            "that one request may have; send several requests",
        )
    if request.stream_options.include_usage and not request.stream:
        raise invalid("stream_options", "they belong to stream=true")


def sampling_params(
    request: GenerationRequest, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    stop = request.stop
    fields = msgspec.structs.asdict(request)
    return SamplingParams(
        **{name: value for name, value in fields.items() if name in _SAME_NAMES}
        | {
            "max_tokens": max_tokens,
            "top_k": max(0, request.top_k),
            "seed": None if request.seed is None else request.seed & _LARGEST_SEED,
            "stop": (stop,) if isinstance(stop, str) else stop,
            "include_stop": request.include_stop_str_in_output,
            "logprobs": logprobs,
        }
    )


def requested_tokens(request: GenerationRequest) -> int | None:
    """Return the requested limit of output tokens. None if there is none."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        what = f"{old} contradicts max_completion_tokens={new}; send one of them"
        raise invalid("max_tokens", what)
    return old if new is None else new


def _of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Return the parameters of one choice: choices of a request get different seeds."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & _LARGEST_SEED)


class UsageMeter:
    """Counts the tokens of a job. A prompt counts once, even if it has several choices."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._outputs: dict[int, tuple[int, int, int]] = {}  # prompt, cached, output; by choice

    def add(self, piece: TextPiece) -> None:
        output = piece.output
        self._outputs[piece.choice] = (
            output.num_prompt_tokens,
            output.num_cached_tokens,
            output.num_output_tokens,
        )

    def usage(self) -> Usage:
        prompt_tokens = cached_tokens = completion_tokens = 0
        for index, (num_prompt, num_cached, num_output) in self._outputs.items():
            completion_tokens += num_output
            if index % self._job.num_choices == 0:
                prompt_tokens += num_prompt
                cached_tokens += num_cached
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens),
        )

    def in_chunk(self) -> Usage | UnsetType | None:
        """Return the `usage` field of a chunk with tokens: the usage so far, null, or no field."""
        if self._job.continuous_usage:
            return self.usage()
        return None if self._job.include_usage else UNSET
