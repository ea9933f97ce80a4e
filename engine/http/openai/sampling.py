"""Converts the fields of a request to the engine's sampling parameters."""

import msgspec

from stepscope.engine.http.errors import ApiError
from stepscope.engine.http.openai.requests import MAX_CHOICES, GenerationRequest
from stepscope.engine.protocol.settings.sampling_params import SamplingParams

_LARGEST_SEED = 2**63 - 1


def sampling_params(
    request: GenerationRequest, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Fields that the client did not send get OpenAI's defaults: temperature 1, no top-k, top-p,
    min-p.
    """
    stop = request.stop
    top_k = request.top_k
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=0 if top_k is None or top_k < 0 else top_k,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=(
            1.0 if request.repetition_penalty is None else request.repetition_penalty
        ),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=None if request.seed is None else request.seed & _LARGEST_SEED,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        include_stop=bool(request.include_stop_str_in_output),
        logprobs=logprobs,
    )


def requested_tokens(request: GenerationRequest) -> int | None:
    """Return the requested limit of output tokens. None if there is none.

    `max_tokens` is the old name of `max_completion_tokens`.
    """
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            400,
            f"max_tokens: {old} contradicts max_completion_tokens={new}; send one of them",
            param="max_tokens",
            code="invalid_value",
        )
    return old if new is None else new


def sampling_of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Return the parameters of one choice, with a seed derived from the request's seed, if any.

    Choices of a request get different seeds. The same request gets the same seeds again.
    """
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & _LARGEST_SEED)


def check_choices(request: GenerationRequest, num_prompts: int) -> int:
    """Return the number of choices for each prompt.

    Raises:
        ApiError: too many choices in total, or stream options without a stream.
    """
    num_choices = request.n or 1
    if num_prompts * num_choices > MAX_CHOICES:
        raise ApiError(
            400,
            f"n: {num_prompts} prompts times n={num_choices} are more than the {MAX_CHOICES} "
            "choices that one request may have; send several requests",
            param="n",
            code="invalid_value",
        )
    options = request.stream_options
    if options is not None and options.include_usage and not request.stream:
        raise ApiError(
            400,
            "stream_options: they belong to stream=true",
            param="stream_options",
            code="invalid_value",
        )
    return num_choices
