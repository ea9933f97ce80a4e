"""`/v1/completions` and `/v1/chat/completions`: makes jobs of requests, and choices of outputs."""

from msgspec import UNSET, UnsetType

from stepscope.engine.http.errors import invalid, not_supported
from stepscope.engine.http.openai.job import (
    ChatAnswer,
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionChoice,
    CompletionLogprobs,
    Head,
    Job,
    Writer,
    make_job,
    requested_tokens,
    sampling_params,
)
from stepscope.engine.http.openai.requests import ChatRequest, ChatTurn, CompletionRequest, TokenId
from stepscope.engine.protocol.commands import ChatMessage, Submit
from stepscope.engine.protocol.replies import Output, PositionLogprobs, TokenLogprob


def chat_job(request: ChatRequest, head: Head, max_model_len: int) -> Job:
    """Convert a chat request to a job. Raises ApiError if the request is invalid."""
    messages = [_message(index, turn) for index, turn in enumerate(request.messages)]
    max_tokens = requested_tokens(request)
    sampling = sampling_params(
        request, max_model_len if max_tokens is None else max_tokens, _num_logprobs(request)
    )
    # Without max_tokens, generate until the model stops or the context is full.
    prompt = Submit(messages=messages, sampling=sampling, fit_max_tokens=max_tokens is None)
    kinds = "chat.completion.chunk", "chat.completion"
    return make_job(request, head, [prompt], Writer(head, kinds, ChatChoices()))


def _message(index: int, turn: ChatTurn) -> ChatMessage:
    where = f"messages[{index}]"
    if isinstance(turn.content, str):
        return ChatMessage(role=turn.role, content=turn.content)
    texts = []
    for number, part in enumerate(turn.content):
        if part.type != "text" or part.text is None:
            param = f"{where}.content[{number}].type"
            raise not_supported(param, part.type, "text is all that goes in and out")
        texts.append(part.text)
    return ChatMessage(role=turn.role, content=texts if len(texts) > 1 else "".join(texts))


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs=true")
    return request.top_logprobs if request.logprobs else None


class ChatChoices:
    """Makes the choices of one answer, or of its chunks."""

    def __init__(self) -> None:
        self._begun: set[int] = set()  # choices whose role was sent

    def __call__(self, index: int, output: Output, is_chunk: bool) -> ChatChoice:
        delta: ChatDelta | UnsetType = UNSET
        if is_chunk:
            # The role comes with the first token: clients would count its own chunk as a token.
            role: str | UnsetType = UNSET if index in self._begun else "assistant"
            self._begun.add(index)
            delta = ChatDelta(role=role, content=output.text or "")
        return ChatChoice(
            index=index,
            delta=delta,
            message=UNSET if is_chunk else ChatAnswer(content=output.text or ""),
            logprobs=_logprobs(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop,
        )


def _logprobs(positions: list[PositionLogprobs] | None) -> ChatLogprobs | None:
    if positions is None:
        return None
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=position.chosen.text,
                logprob=position.chosen.logprob,
                bytes=_bytes(position.chosen),
                top_logprobs=[_top(token) for token in position.top],
            )
            for position in positions
        ]
    )


def _top(token: TokenLogprob) -> ChatTopLogprob:
    return ChatTopLogprob(token=token.text, logprob=token.logprob, bytes=_bytes(token))


def _bytes(token: TokenLogprob) -> list[int]:
    return list(token.text.encode() if token.utf8 is None else token.utf8)


DEFAULT_MAX_TOKENS = 16  # OpenAI's default


def completion_job(request: CompletionRequest, head: Head) -> Job:
    """Convert a completion request to a job. Raises ApiError if the request is invalid."""
    prompts = _prompts(request.prompt)
    max_tokens = requested_tokens(request) or DEFAULT_MAX_TOKENS
    sampling = sampling_params(request, max_tokens, request.logprobs)
    submits = [
        Submit(prompt=text, prompt_token_ids=token_ids, sampling=sampling)
        for text, token_ids in prompts
    ]
    kinds = "text_completion", "text_completion"
    return make_job(request, head, submits, Writer(head, kinds, CompletionChoices()))


def _prompts(
    prompt: str | list[str | TokenId | list[TokenId]],
) -> list[tuple[str | None, list[int] | None]]:
    if isinstance(prompt, str):
        return [(prompt, None)]
    if not prompt:
        raise invalid("prompt", "the list is empty")
    texts = [each for each in prompt if isinstance(each, str)]
    if len(texts) == len(prompt):
        return [(text, None) for text in texts]
    lists = [each for each in prompt if isinstance(each, list)]
    if len(lists) == len(prompt):
        return [(None, each) for each in lists]
    token_ids = [each for each in prompt if isinstance(each, int)]
    if len(token_ids) == len(prompt):
        return [(None, token_ids)]
    raise invalid(
        "prompt",
        "expected a text, token ids, a list of texts or a list of lists of token ids, "
        "got a mixture",
    )


class CompletionChoices:
    """Makes the choices of one answer, or of its chunks."""

    def __init__(self) -> None:
        self._num_chars: dict[int, int] = {}  # sent so far, by choice; only with logprobs

    def __call__(self, index: int, output: Output, _: bool) -> CompletionChoice:
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._logprobs(index, output.logprobs)
        return CompletionChoice(
            index=index,
            text=output.text or "",
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop,
        )

    def _logprobs(self, index: int, positions: list[PositionLogprobs]) -> CompletionLogprobs:
        offset = self._num_chars.get(index, 0)
        offsets = []
        tops = []
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
        return CompletionLogprobs(
            tokens=[position.chosen.text for position in positions],
            token_logprobs=[position.chosen.logprob for position in positions],
            top_logprobs=tops,
            text_offset=offsets,
        )
