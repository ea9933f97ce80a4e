"""Chooses one token a row from its logits.

The random number of a token is a function of its request's seed and its place in the output, and a
row is worked on by itself. So the same logits and seed give the same text whatever else is in the
batch, and again after a preemption. Of what a request did before only `TokenCounts` are kept, where
it has penalties.

On a CPU rows are sampled by `host_sampling`; on a device, here, all of a kind at once.
"""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from stepscope.engine.commands import PositionLogprobs, SamplingParams, TokenLogprob
from stepscope.engine.execution import host_sampling
from stepscope.engine.execution.host_sampling import LEAST_LOGPROB, LEAST_TEMPERATURE, Choice
from stepscope.engine.execution.token_counts import TokenCounts
from stepscope.engine.request import Request

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), the same for the same arguments, without a visible pattern in either.

    Two rounds of SplitMix64 (Steele, Lea and Flood, 2014), a counter-based generator.
    """
    return (_mix(_mix(seed) ^ position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Sampled(NamedTuple):
    """What was chosen for some rows, in their order."""

    token_ids: list[int]
    logprobs: dict[int, PositionLogprobs]  # of the rows whose requests ask for them


class Sampler:
    """Greedy, temperature, top-k, top-p, min-p, penalties, a seed per request; rows may differ."""

    def __init__(self, seed: int, *, on_host: bool | None = None) -> None:
        """`seed` is the one that requests without their own derive theirs from.

        `on_host` says where rows are sampled; None: on the CPU if that is where the logits are.
        """
        self._seed = seed
        self._on_host = on_host
        self._counts: WeakKeyDictionary[Request, TokenCounts] = WeakKeyDictionary()

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """The next token of each request.

        Args:
            logits: [rows, vocab_size], in any floating dtype, on any device; left as they are.
            requests: whose rows they are, in the same order.
        """
        vocab_size = logits.shape[-1]
        choices = [
            self._choice(row, request, vocab_size)
            for row, request in enumerate(requests)
            if not request.is_plainly_greedy
        ]
        asked = [row for row, r in enumerate(requests) if r.sampling.logprobs is not None]
        on_host = logits.device.type == "cpu" if self._on_host is None else self._on_host
        if on_host:
            return _sample_on_host(logits, requests, choices, asked)
        return _sample_on_device(logits, requests, choices, asked)

    def _choice(self, row: int, request: Request, vocab_size: int) -> Choice:
        sampling = request.sampling
        num_output = request.num_output_tokens
        random = None
        if sampling.temperature > 0:
            seed = sampling.seed
            if seed is None:
                seed = _mix(_mix(self._seed & _MASK) ^ request.request_id)
            random = uniform(seed, num_output)
        forbidden: list[int] = []
        if num_output < sampling.min_tokens:
            forbidden = sorted(token for token in request.end_token_ids if token < vocab_size)
        counts = None
        if _has_penalties(sampling):
            counts = self._counts.get(request)
            if counts is None:
                counts = TokenCounts(request, with_prompt=sampling.repetition_penalty != 1.0)
                self._counts[request] = counts
            counts.catch_up(request)
        return Choice(row, sampling, random, forbidden, counts)


def _has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _sample_on_host(
    logits: torch.Tensor, requests: Sequence[Request], choices: list[Choice], asked: list[int]
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
        floats = host_sampling.as_floats(rows[choice.row], is_bf16)
        tokens[choice.row] = host_sampling.choose(floats, choice)
    logprobs = {
        row: host_sampling.logprobs(
            host_sampling.as_floats(rows[row], is_bf16),
            tokens[row],
            requests[row].sampling.logprobs or 0,
        )
        for row in asked
    }
    return Sampled(tokens, logprobs)


# The same on a device: as few operations as there are, over all rows that need one.


def _sample_on_device(
    logits: torch.Tensor, requests: Sequence[Request], choices: list[Choice], asked: list[int]
) -> Sampled:
    tokens = _finite(logits.float()).argmax(dim=-1)
    if choices:
        rows = torch.tensor([choice.row for choice in choices], device=logits.device)
        tokens[rows] = _choose(logits[rows].float(), choices)
    if not asked:
        return Sampled(tokens.tolist(), {})
    rows = torch.tensor(asked, device=logits.device)
    nums = [requests[row].sampling.logprobs or 0 for row in asked]
    found = _logprobs(logits[rows].float(), tokens[rows], nums)
    return Sampled(tokens.tolist(), dict(zip(asked, found, strict=True)))


def _choose(logits: torch.Tensor, choices: list[Choice]) -> torch.Tensor:
    """Tokens [rows]; `logits` [rows, vocab_size] are overwritten."""
    _penalise(logits, choices)
    logits = _finite(_without_forbidden(logits, choices))
    drawn = [i for i, choice in enumerate(choices) if choice.random is not None]
    tokens = logits.argmax(dim=-1)
    if not drawn:
        return tokens
    rows = torch.tensor(drawn, device=logits.device)
    tokens[rows] = _draw(logits[rows], [choices[i] for i in drawn])
    return tokens


def _penalise(logits: torch.Tensor, choices: list[Choice]) -> None:
    """`host_sampling.penalise` for all rows at once: one gather and one scatter."""
    penalised = [(i, c.sampling, c.counts) for i, c in enumerate(choices) if c.counts is not None]
    if not penalised:
        return
    lengths = [len(counts.token_ids) for _, _, counts in penalised]

    def spread(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths)).to(logits.device)

    rows = torch.from_numpy(np.repeat([i for i, _, _ in penalised], lengths)).to(logits.device)
    columns = torch.from_numpy(np.concatenate([c.token_ids for _, _, c in penalised]))
    columns = columns.to(logits.device)
    counts = torch.from_numpy(np.concatenate([c.counts for _, _, c in penalised]))
    counts = counts.to(logits.device)
    factor = spread([s.repetition_penalty for _, s, _ in penalised])
    values = logits[rows, columns]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= spread([s.frequency_penalty for _, s, _ in penalised]) * counts
    values -= spread([s.presence_penalty for _, s, _ in penalised]) * (counts > 0)
    logits[rows, columns] = values


def _without_forbidden(logits: torch.Tensor, choices: list[Choice]) -> torch.Tensor:
    """Rows without the tokens that would end them too early; one with nothing else stays."""
    pairs = [(i, token) for i, choice in enumerate(choices) for token in choice.forbidden]
    if not pairs:
        return logits
    rows, columns = torch.tensor(pairs, device=logits.device).T
    left = logits.clone()
    left[rows, columns] = float("-inf")
    nothing_left = left.amax(dim=-1, keepdim=True) == float("-inf")
    return torch.where(nothing_left, logits, left)


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """As in `host_sampling`; without a look at the values, which would wait for the device."""
    logits = torch.nan_to_num(logits, nan=float("-inf"), neginf=float("-inf"))
    impossible = logits.amax(dim=-1, keepdim=True) == float("-inf")
    return logits.masked_fill(impossible, 0.0)


def _draw(logits: torch.Tensor, choices: list[Choice]) -> torch.Tensor:
    """Tokens [rows] by inverse transform over what min-p, top-k and top-p leave."""
    params = [choice.sampling for choice in choices]
    temperature = _column([max(p.temperature, LEAST_TEMPERATURE) for p in params], logits)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if any(p.min_p > 0 for p in params):
        # The logarithm of 0 is -inf: no floor.
        least = _column([p.min_p for p in params], logits).log()
        logits = logits.masked_fill(logits < least, float("-inf"))
    logits = _top_k(logits, params)
    logits = _top_p(logits, params)
    cumulated = torch.softmax(logits, dim=-1).double().cumsum(dim=-1)
    total = cumulated[:, -1:].contiguous()
    randoms = [choice.random for choice in choices]
    target = torch.tensor(randoms, dtype=torch.float64, device=logits.device)[:, None] * total
    tokens = torch.searchsorted(cumulated, target, right=True)
    # A target that rounds up to the total falls behind the last token that can be drawn.
    return torch.minimum(tokens, torch.searchsorted(cumulated, total))[:, 0]


def _top_k(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    asked = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if not asked:
        return logits
    rows = torch.tensor(asked, device=logits.device)
    top_k = torch.tensor([params[i].top_k for i in asked], device=logits.device)[:, None]
    best = logits[rows].topk(max(params[i].top_k for i in asked), dim=-1).values
    return _from(logits, rows, best.gather(-1, top_k - 1))


def _top_p(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    asked = [i for i, p in enumerate(params) if p.top_p < 1]
    if not asked:
        return logits
    rows = torch.tensor(asked, device=logits.device)
    ordered = logits[rows].sort(dim=-1, descending=True).values
    cumulated = torch.softmax(ordered, dim=-1).double().cumsum(dim=-1)
    top_p = torch.tensor([params[i].top_p for i in asked], dtype=torch.float64)
    target = top_p.to(logits.device)[:, None] * cumulated[:, -1:]
    last = torch.searchsorted(cumulated, target).clamp_(max=logits.shape[-1] - 1)
    return _from(logits, rows, ordered.gather(-1, last))


def _from(logits: torch.Tensor, rows: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """`logits` in whose `rows` only those that are `least` [len(rows), 1] or more are possible."""
    floor = torch.full_like(logits[:, :1], float("-inf"))
    floor[rows] = least
    return logits.masked_fill(logits < floor, float("-inf"))


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, nums: list[int]
) -> list[PositionLogprobs]:
    values = torch.log_softmax(_finite(logits), dim=-1).clamp_(min=LEAST_LOGPROB)
    chosen = values.gather(-1, tokens[:, None])
    ranks = (1 + (values > chosen).sum(dim=-1)).tolist()
    best = values.topk(min(max(nums), values.shape[-1]), dim=-1)
    found = []
    for token, logprob, rank, num, top, ids in zip(
        tokens.tolist(),
        chosen[:, 0].tolist(),
        ranks,
        nums,
        best.values.tolist(),
        best.indices.tolist(),
        strict=True,
    ):
        # Of equally likely ones the first first.
        ordered = sorted(zip(top, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
        named = [TokenLogprob(token_id, value) for value, token_id in ordered[:num]]
        found.append(PositionLogprobs(TokenLogprob(token, logprob), rank, named))
    return found


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32)[:, None]).to(like.device)
