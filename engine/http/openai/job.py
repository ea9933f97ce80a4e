"""`Job`: one HTTP request as commands for the engine, with the `Writer` of its answer."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from stepscope.engine.http.openai.generation import TextPiece
from stepscope.engine.http.openai.requests import GenerationRequest
from stepscope.engine.http.openai.responses import PromptTokensDetails, Usage
from stepscope.engine.http.openai.sampling import check_choices, sampling_of_choice
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Output


class Head(NamedTuple):
    """The fields that every response and every chunk of a stream has."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str | None


class Writer(Protocol):
    """Writes the JSON of one kind of answer: chat or completion."""

    def chunk(self, piece: TextPiece, usage: Usage | UnsetType | None) -> bytes: ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the last chunk of a stream. It has the usage and no choices."""
        ...

    def whole(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """Return the answer to a request that does not stream.

        Args:
            outputs: one per choice, in order.
        """
        ...


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
    num_choices = check_choices(request, len(prompts))
    submits = [
        msgspec.structs.replace(
            prompt,
            client_id=request.user or head.id,
            sampling=sampling_of_choice(prompt.sampling, choice),
            priority=request.priority or 0,
            stream=bool(request.stream),
        )
        for prompt in prompts
        for choice in range(num_choices)
    ]
    options = request.stream_options
    include_usage = options is not None and bool(options.include_usage)
    return Job(
        submits=submits,
        num_choices=num_choices,
        stream=bool(request.stream),
        include_usage=include_usage,
        continuous_usage=include_usage
        and options is not None
        and bool(options.continuous_usage_stats),
        writer=writer,
    )


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
