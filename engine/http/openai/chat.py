"""`/v1/chat/completions`: takes a conversation, answers with the assistant's next message."""

from msgspec import UNSET, UnsetType

from stepscope.engine.http.errors import invalid, not_supported
from stepscope.engine.http.openai.job import (
    Head,
    Job,
    Writer,
    make_job,
    requested_tokens,
    sampling_params,
)
from stepscope.engine.http.openai.requests import ChatRequest, ChatTurn
from stepscope.engine.http.openai.responses import (
    ChatAnswer,
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
)
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
