"""`/v1/completions`: takes prompts as text or token ids, answers with text."""

from stepscope.engine.http.errors import invalid
from stepscope.engine.http.openai.job import (
    Head,
    Job,
    Writer,
    make_job,
    requested_tokens,
    sampling_params,
)
from stepscope.engine.http.openai.requests import CompletionRequest, TokenId
from stepscope.engine.http.openai.responses import CompletionChoice, CompletionLogprobs
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Output, PositionLogprobs

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
