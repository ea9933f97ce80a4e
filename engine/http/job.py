"""`Job`: one HTTP request as commands for the engine, with the `Writer` of its answer."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from stepscope.engine.http import requests
from stepscope.engine.http.errors import invalid, not_supported
from stepscope.engine.protocol.commands import ChatMessage, Submit
from stepscope.engine.protocol.replies import Output, PositionLogprobs, TokenLogprob
from stepscope.engine.protocol.sampling_params import SamplingParams

MAX_CHOICES = 1024  # of one request: prompts times n
DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_LARGEST_SEED = 2**63 - 1
_SAME_NAMES = set(SamplingParams.__struct_fields__) - {"logprobs"}
_encoder = msgspec.json.Encoder()

Json: TypeAlias = dict[str, Any]
Choices: TypeAlias = "ChatChoices | CompletionChoices"


class Head(NamedTuple):
    """The fields that every response and every chunk of a stream has."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str | None


class TextPiece(NamedTuple):
    """New output of one choice of a request."""

    choice: int
    output: Output


class Writer:
    """Writes the JSON of an answer, or of the chunks of a streamed one, and counts its tokens.

    `num_choices`: of each prompt. A prompt counts once, however many it has.
    """

    def __init__(
        self, head: Head, choices: Choices, num_choices: int, options: requests.StreamOptions
    ) -> None:
        self._head = head
        self._choices = choices
        self._num_choices = num_choices
        self._options = options
        self._outputs: dict[int, Output] = {}  # the newest of each choice

    def add(self, piece: TextPiece) -> None:
        self._outputs[piece.choice] = piece.output

    def chunk(self, piece: TextPiece) -> bytes:
        """Count new output, and return the chunk with it."""
        self.add(piece)
        usage: Json = {}
        if self._options.include_usage:
            is_told = self._options.continuous_usage_stats
            usage = {"usage": self._usage() if is_told else None}
        return self._write(0, [self._choices.made(piece.choice, piece.output, True)], usage)

    def usage_chunk(self) -> bytes | None:
        """Return the last chunk of a stream, with the usage and no choices, if it was asked for."""
        wanted = self._options.include_usage
        return self._write(0, [], {"usage": self._usage()}) if wanted else None

    def whole(self) -> bytes:
        outputs = sorted(self._outputs.items())
        choices = [self._choices.made(index, output, False) for index, output in outputs]
        return self._write(1, choices, {"usage": self._usage()})

    def _usage(self) -> Json:
        prompt_tokens = cached_tokens = completion_tokens = 0
        for index, output in self._outputs.items():
            completion_tokens += output.num_output_tokens
            if index % self._num_choices == 0:
                prompt_tokens += output.num_prompt_tokens
                cached_tokens += output.num_cached_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _write(self, kind: int, choices: list[Json], usage: Json) -> bytes:
        identifier, created, model, fingerprint = self._head
        return _encoder.encode(
            {
                "id": identifier,
                "object": self._choices.kinds[kind],
                "created": created,
                "model": model,
                "system_fingerprint": fingerprint,
                "choices": choices,
                **usage,
            }
        )


class Job(NamedTuple):
    submits: list[Submit]  # choices of the first prompt, then of the second, ...
    stream: bool
    writer: Writer


def chat_job(request: requests.ChatRequest, head: Head, max_model_len: int) -> Job:
    """Convert a chat request to a job. Raises ApiError if the request is invalid."""
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs=true")
    messages = [_message(index, turn) for index, turn in enumerate(request.messages)]
    max_tokens = requested_tokens(request)
    logprobs = request.top_logprobs if request.logprobs else None
    sampling = _sampling(request, max_model_len if max_tokens is None else max_tokens, logprobs)
    # Without max_tokens, generate until the model stops or the context is full.
    prompt = Submit(messages=messages, sampling=sampling, fit_max_tokens=max_tokens is None)
    return _job(request, head, [prompt], ChatChoices())


def completion_job(request: requests.CompletionRequest, head: Head) -> Job:
    """Convert a completion request to a job. Raises ApiError if the request is invalid."""
    max_tokens = requested_tokens(request) or DEFAULT_MAX_TOKENS
    sampling = _sampling(request, max_tokens, request.logprobs)
    prompts = [
        Submit(prompt=each, sampling=sampling)
        if isinstance(each, str)
        else Submit(prompt_token_ids=each, sampling=sampling)
        for each in _prompts(request)
    ]
    return _job(request, head, prompts, CompletionChoices())


def requested_tokens(request: requests.GenerationRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        what = f"{old} contradicts max_completion_tokens={new}; send one of them"
        raise invalid("max_tokens", what)
    return old if new is None else new


def _message(index: int, turn: requests.ChatTurn) -> ChatMessage:
    if isinstance(turn.content, str):
        return ChatMessage(role=turn.role, content=turn.content)
    texts = []
    for number, part in enumerate(turn.content):
        if part.type != "text" or part.text is None:
            param = f"messages[{index}].content[{number}].type"
            raise not_supported(param, part.type, "text is all that goes in and out")
        texts.append(part.text)
    return ChatMessage(role=turn.role, content=texts if len(texts) > 1 else "".join(texts))


def _prompts(request: requests.CompletionRequest) -> Sequence[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [each for each in prompt if isinstance(each, int)]
    others = [each for each in prompt if not isinstance(each, int)]
    if not prompt:
        raise invalid("prompt", "the list is empty")
    if (token_ids and others) or len({type(each) for each in others}) > 1:
        raise invalid(
            "prompt",
            "expected a text, token ids, a list of texts or a list of lists of token ids, "
            "got a mixture",
        )
    return others or [token_ids]


def _sampling(
    request: requests.GenerationRequest, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    fields = msgspec.structs.asdict(request)
    return SamplingParams(
        **{name: value for name, value in fields.items() if name in _SAME_NAMES}
        | {
            "max_tokens": max_tokens,
            "top_k": max(0, request.top_k),
            "seed": None if request.seed is None else request.seed & _LARGEST_SEED,
            "stop": (request.stop,) if isinstance(request.stop, str) else request.stop,
            "include_stop": request.include_stop_str_in_output,
            "logprobs": logprobs,
        }
    )


def _job(
    request: requests.GenerationRequest, head: Head, prompts: Sequence[Submit], choices: Choices
) -> Job:
    if len(prompts) * request.n > MAX_CHOICES:
        raise invalid(
            "n",
            f"{len(prompts)} prompts times n={request.n} are more than the {MAX_CHOICES} choices "
            "that one request may have; send several requests",
        )
    if request.stream_options.include_usage and not request.stream:
        raise invalid("stream_options", "they belong to stream=true")
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
    writer = Writer(head, choices, request.n, request.stream_options)
    return Job(submits, request.stream, writer)


def _of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Return the parameters of one choice: choices of a request get different seeds."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & _LARGEST_SEED)


class ChatChoices:
    """Makes the choices of one chat, or of its chunks."""

    kinds = "chat.completion.chunk", "chat.completion"  # of a chunk, and of a whole answer

    def __init__(self) -> None:
        self._begun: set[int] = set()  # choices whose role was sent

    def made(self, index: int, output: Output, is_chunk: bool) -> Json:
        said: Json = {"role": "assistant", "content": output.text or ""}
        if not is_chunk:
            said["refusal"] = None
        elif index in self._begun:
            del said["role"]  # it came with the first token: a chunk of its own counts as a token
        self._begun.add(index)
        logprobs = output.logprobs
        return {
            "index": index,
            "delta" if is_chunk else "message": said,
            "logprobs": None
            if logprobs is None
            else {"content": [_chat_logprobs(each) for each in logprobs], "refusal": None},
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop,
        }


def _chat_logprobs(position: PositionLogprobs) -> Json:
    return {
        **_chat_token(position.chosen),
        "top_logprobs": [_chat_token(token) for token in position.top],
    }


def _chat_token(token: TokenLogprob) -> Json:
    data = token.text.encode() if token.utf8 is None else token.utf8
    return {"token": token.text, "logprob": token.logprob, "bytes": list(data)}


class CompletionChoices:
    """Makes the choices of one completion, or of its chunks."""

    kinds = "text_completion", "text_completion"

    def __init__(self) -> None:
        self._num_chars: dict[int, int] = {}  # sent so far, by choice; only with logprobs

    def made(self, index: int, output: Output, _: bool) -> Json:
        logprobs = output.logprobs
        return {
            "index": index,
            "text": output.text or "",
            "logprobs": None if logprobs is None else self._logprobs(index, logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop,
        }

    def _logprobs(self, index: int, positions: list[PositionLogprobs]) -> Json:
        offset = self._num_chars.get(index, 0)
        offsets, tops = [], []
        for position in positions:
            if position.text_offset is not None:
                offset = position.text_offset
            offsets.append(offset)
            offset += len(position.chosen.text)
            # The first of two tokens with the same text is the likelier one.
            top: dict[str, float] = {}
            for token in (*position.top, position.chosen):
                top.setdefault(token.text, token.logprob)
            tops.append(top)
        self._num_chars[index] = offset
        return {
            "tokens": [position.chosen.text for position in positions],
            "token_logprobs": [position.chosen.logprob for position in positions],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
