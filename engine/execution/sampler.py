"""Samples one token per row from its logits.

A token's random number depends only on its request's seed and its position in the output, and each
row is sampled independently. So the same logits and seed give the same text with any other requests
in the batch, and also after a preemption. The only state between steps is `TokenCounts`, for
requests with penalties.

On a CPU, `host_sampling` samples the rows one by one. On a GPU, `SamplesOnDevice` follows the same
rules for all rows that need the same operation at once. It launches as few operations as possible.
None of them waits for the device, except `collect`.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch

from stepscope.engine.execution import host_sampling
from stepscope.engine.execution.devices import HostCopy
from stepscope.engine.execution.host_sampling import (
    LEAST_LOGPROB,
    LEAST_TEMPERATURE,
    UNSOUND,
    Sampled,
    TokenChoice,
    TokenCounts,
    as_floats,
)
from stepscope.engine.protocol.replies import PositionLogprobs, TokenLogprob
from stepscope.engine.protocol.sampling_params import SamplingParams
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

    def launch(
        self, logits: torch.Tensor, requests: Sequence[Request], depths: Sequence[int] = ()
    ) -> "SamplesInFlight":
        """Start to sample the next token of each request, from logits [rows, vocab_size].

        `depths`: the drafts before it in each row.
        """
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


class SamplesOnHost(NamedTuple):
    """Tokens that were sampled on the host, with the methods of `SamplesOnDevice`."""

    sampled: Sampled
    device: torch.device

    @property
    def tokens(self) -> torch.Tensor:
        # The next step may compute an unsound token before it is dropped: it must be one.
        token_ids = np.array(self.sampled.token_ids, dtype=np.int64)
        return to_device(token_ids.clip(min=0), self.device)

    def collect(self) -> Sampled:
        return self.sampled


class SamplesOnDevice:
    """Samples tokens from logits that the device may still be computing.

    Attributes:
        tokens: `[rows]` int64, on the device of the logits.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        choices: list[TokenChoice],
        asked: list[int],
    ) -> None:
        device = logits.device
        # The greatest is NaN if any is, and its index is a token in any case.
        greatest, tokens = logits.max(dim=-1)
        if choices:
            rows = _indices([choice.row for choice in choices], device)
            tokens[rows] = _choose(logits[rows].float(), choices)
        # Also where unsound: the next step may compute it before it is dropped.
        self.tokens = tokens
        self._asked = asked
        self._nums = [requests[row].sampling.logprobs or 0 for row in asked]
        wanted = [tokens.where(greatest.abs() < float("inf"), UNSOUND)]
        if asked:
            rows = _indices(asked, device)
            wanted += _logprobs(logits[rows].float(), tokens[rows], max(self._nums))
        self._copy = HostCopy(wanted)

    def collect(self) -> Sampled:
        tokens, *wanted = (tensor.tolist() for tensor in self._copy.wait())
        if not wanted:
            return Sampled(tokens, {})
        found = _named([tokens[row] for row in self._asked], self._nums, *wanted)
        pairs = zip(self._asked, found, strict=True)
        return Sampled(tokens, {row: each for row, each in pairs if tokens[row] != UNSOUND})


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


def _choose(logits: torch.Tensor, choices: list[TokenChoice]) -> torch.Tensor:
    """Return a token for each choice. Overwrites `logits` [len(choices), vocab_size]."""
    _penalise(logits, choices)
    logits = _finite(_without_forbidden(logits, choices))
    drawn = [i for i, choice in enumerate(choices) if choice.random is not None]
    tokens = logits.argmax(dim=-1)
    if not drawn:
        return tokens
    rows = _indices(drawn, logits.device)
    tokens[rows] = _draw(logits[rows], [choices[i] for i in drawn])
    return tokens


def _penalise(logits: torch.Tensor, choices: list[TokenChoice]) -> None:
    """Apply the penalties of all rows in place, with one gather and one scatter."""
    penalised = [(i, c.sampling, c.counts) for i, c in enumerate(choices) if c.counts is not None]
    if not penalised:
        return
    lengths = [len(counts.token_ids) for _, _, counts in penalised]

    def spread(values: list[float]) -> torch.Tensor:
        return to_device(np.repeat(np.array(values, np.float32), lengths), logits.device)

    rows = to_device(np.repeat([i for i, _, _ in penalised], lengths), logits.device)
    columns = to_device(np.concatenate([c.token_ids for _, _, c in penalised]), logits.device)
    counts = to_device(np.concatenate([c.counts for _, _, c in penalised]), logits.device)
    factor = spread([s.repetition_penalty for _, s, _ in penalised])
    values = logits[rows, columns]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= spread([s.frequency_penalty for _, s, _ in penalised]) * counts
    values -= spread([s.presence_penalty for _, s, _ in penalised]) * (counts > 0)
    logits[rows, columns] = values


def _without_forbidden(logits: torch.Tensor, choices: list[TokenChoice]) -> torch.Tensor:
    """Return logits with forbidden tokens at -inf. A row with no other token stays unchanged."""
    pairs = [(i, token) for i, choice in enumerate(choices) for token in choice.forbidden]
    if not pairs:
        return logits
    rows, columns = to_device(np.array(pairs), logits.device).T
    left = logits.clone()
    left[rows, columns] = float("-inf")
    nothing_left = left.amax(dim=-1, keepdim=True) == float("-inf")
    return torch.where(nothing_left, logits, left)


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """Return logits with a finite maximum. NaN becomes -inf. If all are -inf, all become 0."""
    logits = torch.nan_to_num(logits, nan=float("-inf"), neginf=float("-inf"))
    impossible = logits.amax(dim=-1, keepdim=True) == float("-inf")
    return logits.masked_fill(impossible, 0.0)


def _draw(logits: torch.Tensor, choices: list[TokenChoice]) -> torch.Tensor:
    """Return a random token for each row, from those that min-p, top-k and top-p leave."""
    params = [choice.sampling for choice in choices]
    temperature = _column([max(p.temperature, LEAST_TEMPERATURE) for p in params], logits)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if any(p.min_p > 0 for p in params):
        # min_p = 0 gives log(0) = -inf, so no floor.
        least = _column([p.min_p for p in params], logits).log()
        logits = logits.masked_fill(logits < least, float("-inf"))
    logits = _top_k(logits, params)
    logits = _top_p(logits, params)
    cumulated = torch.softmax(logits, dim=-1).double().cumsum(dim=-1)
    total = cumulated[:, -1:].contiguous()
    randoms = [choice.random for choice in choices]
    target = to_device(np.array(randoms, np.float64), logits.device)[:, None] * total
    tokens = torch.searchsorted(cumulated, target, right=True)
    # A target that rounds up to the total would fall after the last possible token.
    return torch.minimum(tokens, torch.searchsorted(cumulated, total))[:, 0]


def _top_k(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    asked = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if not asked:
        return logits
    rows = _indices(asked, logits.device)
    top_k = _indices([params[i].top_k for i in asked], logits.device)[:, None]
    best = logits[rows].topk(max(params[i].top_k for i in asked), dim=-1).values
    return _from(logits, rows, best.gather(-1, top_k - 1))


def _top_p(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    asked = [i for i, p in enumerate(params) if p.top_p < 1]
    if not asked:
        return logits
    rows = _indices(asked, logits.device)
    ordered = logits[rows].sort(dim=-1, descending=True).values
    cumulated = torch.softmax(ordered, dim=-1).double().cumsum(dim=-1)
    top_p = to_device(np.array([params[i].top_p for i in asked], np.float64), logits.device)
    target = top_p[:, None] * cumulated[:, -1:]
    last = torch.searchsorted(cumulated, target).clamp_(max=logits.shape[-1] - 1)
    return _from(logits, rows, ordered.gather(-1, last))


def _from(logits: torch.Tensor, rows: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    floor = torch.full_like(logits[:, :1], float("-inf"))
    floor[rows] = least
    return logits.masked_fill(logits < floor, float("-inf"))


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> list[torch.Tensor]:
    """Return logprobs and ranks of `tokens`, and logprobs and ids of the `most` best tokens."""
    values = torch.log_softmax(_finite(logits), dim=-1).clamp_(min=LEAST_LOGPROB)
    chosen = values.gather(-1, tokens[:, None])
    ranks = 1 + (values > chosen).sum(dim=-1)
    best = values.topk(min(most, values.shape[-1]), dim=-1)
    return [chosen[:, 0], ranks, best.values, best.indices]


def _named(
    tokens: list[int],
    nums: list[int],
    logprobs: list[float],
    ranks: list[int],
    tops: list[list[float]],
    top_ids: list[list[int]],
) -> list[PositionLogprobs]:
    found = []
    rows = zip(tokens, logprobs, ranks, nums, tops, top_ids, strict=True)
    for token, logprob, rank, num, top, ids in rows:
        # Equally likely tokens are in the order of their ids.
        ordered = sorted(zip(top, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
        named = [TokenLogprob(token_id, value) for value, token_id in ordered[:num]]
        found.append(PositionLogprobs(TokenLogprob(token, logprob), rank, named))
    return found


def _indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.float32)[:, None], like.device)
