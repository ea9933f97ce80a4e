"""`/v1/chat/completions`: takes a conversation, answers with the assistant's next message."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from stepscope.engine.http.errors import ApiError, not_supported
from stepscope.engine.http.openai.generation import TextPiece
from stepscope.engine.http.openai.job import Head, Job, make_job
from stepscope.engine.http.openai.requests import ChatRequest, ChatTurn
from stepscope.engine.http.openai.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    Usage,
)
from stepscope.engine.http.openai.sampling import requested_tokens, sampling_params
from stepscope.engine.protocol.commands import ChatMessage, Submit
from stepscope.engine.protocol.replies import Output, PositionLogprobs, TokenLogprob

_encoder = msgspec.json.Encoder()


def chat_job(request: ChatRequest, head: Head, max_model_len: int) -> Job:
    """Convert a chat request to a job. Raises ApiError if the request is invalid."""
    messages = [_message(index, turn) for index, turn in enumerate(request.messages)]
    max_tokens = requested_tokens(request)
    sampling = sampling_params(
        request, max_model_len if max_tokens is None else max_tokens, _num_logprobs(request)
    )
    # Without max_tokens, generate until the model stops or the context is full.
    prompt = Submit(messages=messages, sampling=sampling, fit_max_tokens=max_tokens is None)
    return make_job(request, head, [prompt], ChatWriter(head))


def _message(index: int, turn: ChatTurn) -> ChatMessage:
    where = f"messages[{index}]"
    if isinstance(turn.content, str):
        return ChatMessage(role=turn.role, content=turn.content)
    if turn.content is None:
        raise ApiError(
            400,
            f"{where}.content: expected text, got null",
            param=f"{where}.content",
            code="invalid_value",
        )
    texts = []
    for number, part in enumerate(turn.content):
        if part.type != "text" or part.text is None:
            param = f"{where}.content[{number}].type"
            raise not_supported(param, part.type, "text is all that goes in and out")
        texts.append(part.text)
    return ChatMessage(role=turn.role, content=texts if len(texts) > 1 else "".join(texts))


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise ApiError(
            400,
            "top_logprobs: needs logprobs=true",
            param="top_logprobs",
            code="invalid_value",
        )
    return None


class ChatWriter:
    """Writes the JSON of chat answers and their chunks. Implements `Writer`."""

    def __init__(self, head: Head) -> None:
        self._head = head._asdict()
        self._begun: set[int] = set()  # choices whose role was sent

    def chunk(self, piece: TextPiece, usage: Usage | UnsetType | None) -> bytes:
        index, output = piece
        # Send the role with the first token: clients would count a separate chunk as a token.
        role: str | UnsetType = UNSET if index in self._begun else "assistant"
        self._begun.add(index)
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(role=role, content=output.text or ""),
            logprobs=_logprobs(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop,
        )
        return self._write([choice], usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._write([], usage)

    def whole(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        return _encoder.encode(
            ChatCompletion(
                **self._head,
                choices=[
                    ChatChoice(
                        index=index,
                        message=ChatAnswer(content=output.text or ""),
                        logprobs=_logprobs(output.logprobs),
                        finish_reason=output.finish_reason,
                        stop_reason=output.stop,
                    )
                    for index, output in enumerate(outputs)
                ],
                usage=usage,
            )
        )

    def _write(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        return _encoder.encode(ChatChunk(**self._head, choices=choices, usage=usage))


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
