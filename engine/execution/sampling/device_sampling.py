"""Samples tokens on a device, by the same rules as `host_sampling`, for many rows at once.

It launches as few operations as possible. None of them waits for the device, except
`SamplesOnDevice.collect`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from stepscope.engine.execution.machine.devices import HostCopy
from stepscope.engine.execution.sampling.host_sampling import (
    LEAST_LOGPROB,
    LEAST_TEMPERATURE,
    UNSOUND,
    Sampled,
    TokenChoice,
)
from stepscope.engine.protocol.replies import PositionLogprobs, TokenLogprob
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.scheduling.request import Request
from stepscope.kernels.paged_attention import to_device


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
        floats = logits.float()
        is_sound = torch.isfinite(floats.amax(dim=-1))
        tokens = _finite(floats).argmax(dim=-1)
        if choices:
            rows = _indices([choice.row for choice in choices], device)
            tokens[rows] = _choose(logits[rows].float(), choices)
        # Also where unsound: the next step may compute it before it is dropped.
        self.tokens = tokens
        self._asked = asked
        self._nums = [requests[row].sampling.logprobs or 0 for row in asked]
        wanted = [tokens.masked_fill(~is_sound, UNSOUND)]
        if asked:
            rows = _indices(asked, device)
            wanted += _logprobs(logits[rows].float(), tokens[rows], max(self._nums))
        self._copy = HostCopy(wanted)

    def collect(self) -> Sampled:
        """Wait for the tokens and return them."""
        tokens, *wanted = (tensor.tolist() for tensor in self._copy.wait())
        if not wanted:
            return Sampled(tokens, {})
        found = _named([tokens[row] for row in self._asked], self._nums, *wanted)
        pairs = zip(self._asked, found, strict=True)
        return Sampled(tokens, {row: each for row, each in pairs if tokens[row] != UNSOUND})


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
    """Convert the result of `_logprobs` to a reply for each row."""
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
