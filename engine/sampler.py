"""Chooses one token a row from its logits.

Nothing is kept between calls: the random number of a token is a function of its request's seed and
its place in the output. So a seed gives the same text whatever else is in the batch, and again
after a preemption.
"""

from collections.abc import Sequence

import numpy as np
import torch

from stepscope.engine.commands import SamplingParams
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


class Sampler:
    """Greedy, temperature, top-k, top-p, min-p, with a seed per request; rows may differ."""

    def __init__(self, seed: int) -> None:
        """`seed` is the one that requests without their own derive theirs from."""
        self._seed = seed

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token of each request.

        Args:
            logits: [rows, vocab_size], in any floating dtype, on any device.
            requests: whose rows they are, in the same order.
        """
        # Ties of bf16 logits are broken the same way on every device once they are fp32, and on a
        # CPU the argmax is many times faster.
        logits = _without_early_ends(logits.float(), requests)
        drawn = [i for i, request in enumerate(requests) if request.sampling.temperature > 0]
        if not drawn:
            return logits.argmax(dim=-1).tolist()
        randoms = [self._uniform(requests[i]) for i in drawn]
        if len(drawn) == len(requests):
            return _draw(logits, [r.sampling for r in requests], randoms).tolist()
        tokens = logits.argmax(dim=-1)
        rows = torch.tensor(drawn, device=logits.device)
        params = [requests[i].sampling for i in drawn]
        tokens[rows] = _draw(logits[rows], params, randoms)
        return tokens.tolist()

    def _uniform(self, request: Request) -> float:
        seed = request.sampling.seed
        if seed is None:
            seed = _mix(_mix(self._seed & _MASK) ^ request.request_id)
        return uniform(seed, request.num_output_tokens)


def _without_early_ends(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Before it has got its `min_tokens`, a request cannot draw a token that would end it."""
    held = [
        row
        for row, request in enumerate(requests)
        if request.num_output_tokens < request.sampling.min_tokens and request.end_token_ids
    ]
    if not held:
        return logits
    logits = logits.clone()
    for row in held:
        ends = [token for token in requests[row].end_token_ids if token < logits.shape[-1]]
        logits[row, ends] = float("-inf")
    return logits


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]
) -> torch.Tensor:
    """Tokens [rows] by inverse transform: the one at which the cumulated probability passes."""
    temperature = _column([p.temperature for p in params], logits)
    # Rows are shifted first, so that a temperature close to 0 overflows to -inf and not to NaN.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    probs = torch.softmax(logits, dim=-1)
    if any(p.min_p > 0 for p in params):
        least = _column([p.min_p for p in params], probs) * probs.amax(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0.0)
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        probs = _cut(probs, params)
    # In the order of the vocabulary, not of the probabilities: rounding that swaps two equal ones
    # must not change the text. Doubles, because a vocabulary has 10^5 addends.
    cumulated = probs.double().cumsum(dim=-1)
    target = torch.tensor(randoms, dtype=torch.float64, device=logits.device)[:, None]
    tokens = torch.searchsorted(cumulated, target * cumulated[:, -1:], right=True)[:, 0]
    # A target that rounds up to the total falls behind the last token that can be drawn.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(tokens, last)


def _cut(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """`probs` with 0 for what is not among the top-k, or not needed to reach top-p."""
    vocab_size = probs.shape[-1]
    values, order = probs.sort(dim=-1, descending=True, stable=True)
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    ranks = torch.arange(vocab_size, device=probs.device)
    kept = ranks < torch.tensor(top_k, device=probs.device)[:, None]
    values = values.masked_fill(~kept, 0.0)
    # top-p of what top-k has left. The most likely token always stays.
    before = values.double().cumsum(dim=-1) - values
    top_p = _column([p.top_p for p in params], values).double()
    everything = top_p >= 1
    kept &= everything | (before < top_p * values.double().sum(dim=-1, keepdim=True)) | (ranks == 0)
    values = values.masked_fill(~kept, 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, values)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32)[:, None]).to(like.device)
