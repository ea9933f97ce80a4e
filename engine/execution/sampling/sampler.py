"""Samples one token per row from its logits.

A token's random number depends only on its request's seed and its position in the output, and each
row is sampled independently. So the same logits and seed give the same text with any other requests
in the batch, and also after a preemption. The only state between steps is `TokenCounts`, for
requests with penalties.

On a CPU, `host_sampling` samples the rows one by one. On a GPU, `device_sampling` handles all rows
that need the same operation at once.
"""

from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch

from stepscope.engine.execution.sampling import host_sampling
from stepscope.engine.execution.sampling.device_sampling import SamplesOnDevice
from stepscope.engine.execution.sampling.host_sampling import (
    UNSOUND,
    Sampled,
    TokenChoice,
    TokenCounts,
    as_floats,
)
from stepscope.engine.scheduling.request import Request
from stepscope.kernels.paged_attention import to_device

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) by two rounds of SplitMix64 (Steele, Lea and Flood, 2014)."""
    return (_mix(_mix(seed) ^ position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Sampler:
    """Samples greedily or with temperature, top-k, top-p, min-p, penalties, a seed per request."""

    def __init__(self, seed: int, *, on_host: bool | None = None) -> None:
        """`seed`: requests without their own seed derive one from this.

        `on_host`: whether to sample on the CPU. None: on the device that has the logits.
        """
        self._seed = seed
        self._on_host = on_host
        self._counts: WeakKeyDictionary[Request, TokenCounts] = WeakKeyDictionary()

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """Return the next token of each request, from logits [rows, vocab_size] of any device."""
        return self.launch(logits, requests).collect()

    def launch(
        self, logits: torch.Tensor, requests: Sequence[Request], depths: Sequence[int] = ()
    ) -> "SamplesInFlight":
        """Start to sample each request's next token. `depths`: the drafts before it in each row."""
        vocab_size = logits.shape[-1]
        choices = [
            self._choice(row, request, vocab_size, depths[row] if depths else 0)
            for row, request in enumerate(requests)
            if not request.is_plainly_greedy
        ]
        asked = [row for row, r in enumerate(requests) if r.sampling.logprobs is not None]
        on_host = logits.device.type == "cpu" if self._on_host is None else self._on_host
        if on_host:
            return SamplesOnHost(_sample_on_host(logits, requests, choices, asked), logits.device)
        return SamplesOnDevice(logits, requests, choices, asked)

    def seed_of(self, request: Request) -> int:
        """Return the request's own seed."""
        seed = request.sampling.seed
        return _mix(_mix(self._seed & _MASK) ^ request.request_id) >> 1 if seed is None else seed

    def _choice(self, row: int, request: Request, vocab_size: int, depth: int) -> TokenChoice:
        sampling = request.sampling
        num_output = request.num_output_tokens + request.num_pending_tokens + depth
        random = None
        if sampling.temperature > 0:
            random = uniform(self.seed_of(request), num_output)
        forbidden: list[int] = []
        if num_output < sampling.min_tokens:
            forbidden = sorted(token for token in request.end_token_ids if token < vocab_size)
        counts = None
        if request.has_penalties:
            counts = self._counts.get(request)
            if counts is None:
                counts = TokenCounts(request, with_prompt=sampling.repetition_penalty != 1.0)
                self._counts[request] = counts
            counts.catch_up(request)
        return TokenChoice(row, sampling, random, forbidden, counts)


class SamplesOnHost:
    """Tokens that were sampled on the host, with the methods of `SamplesOnDevice`."""

    def __init__(self, sampled: Sampled, device: torch.device) -> None:
        self._sampled = sampled
        self._device = device

    @property
    def tokens(self) -> torch.Tensor:
        # The next step may compute an unsound token before it is dropped: it must be one.
        token_ids = np.array(self._sampled.token_ids, dtype=np.int64)
        return to_device(token_ids.clip(min=0), self._device)

    def collect(self) -> Sampled:
        return self._sampled


SamplesInFlight: TypeAlias = SamplesOnHost | SamplesOnDevice


def _sample_on_host(
    logits: torch.Tensor, requests: Sequence[Request], choices: list[TokenChoice], asked: list[int]
) -> Sampled:
    is_bf16 = logits.dtype == torch.bfloat16
    rows = logits.view(torch.int16).numpy() if is_bf16 else logits.numpy()
    if not choices and not asked:
        return Sampled(host_sampling.greedy(rows, is_bf16), {})
    tokens = [0] * len(requests)
    plain = sorted(set(range(len(requests))).difference(choice.row for choice in choices))
    for row in plain:
        tokens[row] = host_sampling.greedy(rows[row : row + 1], is_bf16)[0]
    for choice in choices:
        tokens[choice.row] = host_sampling.choose(as_floats(rows[choice.row], is_bf16), choice)
    logprobs = {}
    for row in asked:
        if tokens[row] != UNSOUND:
            floats, most = as_floats(rows[row], is_bf16), requests[row].sampling.logprobs or 0
            logprobs[row] = host_sampling.logprobs(floats, tokens[row], most)
    return Sampled(tokens, logprobs)
