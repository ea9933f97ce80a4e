"""`/v1/completions`: takes prompts as text or token ids, answers with text."""

from collections.abc import Sequence

import msgspec
from msgspec import UnsetType

from stepscope.engine.http.errors import ApiError
from stepscope.engine.http.openai.generation import TextPiece
from stepscope.engine.http.openai.job import Head, Job, make_job
from stepscope.engine.http.openai.requests import CompletionRequest, TokenId
from stepscope.engine.http.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from stepscope.engine.http.openai.sampling import requested_tokens, sampling_params
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Output, PositionLogprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's default

_encoder = msgspec.json.Encoder()


def completion_job(request: CompletionRequest, head: Head) -> Job:
    """Convert a completion request to a job. Raises ApiError if the request is invalid."""
    prompts = _prompts(request.prompt)
    max_tokens = requested_tokens(request) or DEFAULT_MAX_TOKENS
    sampling = sampling_params(request, max_tokens, request.logprobs)
    submits = [
        Submit(prompt=text, prompt_token_ids=token_ids, sampling=sampling)
        for text, token_ids in prompts
    ]
    return make_job(request, head, submits, CompletionWriter(head))


def _prompts(
    prompt: str | list[str | TokenId | list[TokenId]],
) -> list[tuple[str | None, list[int] | None]]:
    """Return the prompts as pairs of text and token ids. One of the two is None."""
    if isinstance(prompt, str):
        return [(prompt, None)]
    if not prompt:
        raise ApiError(400, "prompt: the list is empty", param="prompt", code="invalid_value")
    texts = [each for each in prompt if isinstance(each, str)]
    if len(texts) == len(prompt):
        return [(text, None) for text in texts]
    lists = [each for each in prompt if isinstance(each, list)]
    if len(lists) == len(prompt):
        return [(None, each) for each in lists]
    token_ids = [each for each in prompt if isinstance(each, int)]
    if len(token_ids) == len(prompt):
        return [(None, token_ids)]
    raise ApiError(
        400,
        "prompt: expected a text, token ids, a list of texts or a list of lists of token ids, "
        "got a mixture",
        param="prompt",
        code="invalid_value",
    )


class CompletionWriter:
    """Writes the JSON of completions and their chunks. Implements `Writer`."""

    def __init__(self, head: Head) -> None:
        self._head = head._asdict()
        self._num_chars: dict[int, int] = {}  # sent so far, by choice; only with logprobs

    def chunk(self, piece: TextPiece, usage: Usage | UnsetType | None) -> bytes:
        return self._write([self._choice(piece.choice, piece.output)], usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._write([], usage)

    def whole(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return self._write(choices, usage)

    def _write(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return _encoder.encode(Completion(**self._head, choices=choices, usage=usage))

    def _choice(self, index: int, output: Output) -> CompletionChoice:
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
