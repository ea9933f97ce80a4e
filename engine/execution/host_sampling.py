"""Samples a token from one row of logits on a CPU.

It uses NumPy, not torch, and works row by row. So a row fits into a core's cache, and its token
cannot depend on the other rows. Also, no second thread is woken: on a machine shared with a
dashboard, waiting for a second thread costs more than the work. NumPy's argmax, partition and sort
are vectorised too.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.engine.protocol.replies import PositionLogprobs, TokenLogprob
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.request import Request

UNSOUND = -1


class Sampled(NamedTuple):
    """The sampled tokens of some rows, in the order of the rows."""

    token_ids: list[int]  # `UNSOUND` where the row has no finite largest logit
    logprobs: dict[int, PositionLogprobs]  # by row, for requests that ask for logprobs


class TokenCounts:
    """The distinct tokens of a request, in order of first occurrence, and their counts.

    `with_prompt`: whether to include the tokens of the prompt. Only output counts, so the count of
    a prompt token is 0 until the request produces that token.
    """

    def __init__(self, request: Request, with_prompt: bool) -> None:
        different = dict.fromkeys(request.prompt_token_ids if with_prompt else ())
        self._place = {token_id: place for place, token_id in enumerate(different)}
        prompt = np.fromiter(different, np.int64, len(different))
        self._token_ids: npt.NDArray[np.int64] = np.concatenate([prompt, np.empty(64, np.int64)])
        self._counts: npt.NDArray[np.float32] = np.zeros(len(self._token_ids), np.float32)
        self._num_seen = request.num_prompt_tokens  # tokens of the request that are counted

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        return self._token_ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._place)]

    def catch_up(self, request: Request) -> None:
        """Count the tokens that the request has produced since the last call."""
        for token_id in request.token_ids[self._num_seen :]:
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self._num_seen = request.num_tokens


Floats: TypeAlias = npt.NDArray[np.float32]
# Rows of logits. bf16 rows are given by their bits, as 16-bit integers.
Rows: TypeAlias = npt.NDArray[Any]

# Lower temperatures count as this one, because dividing by them could give NaN for the best token.
LEAST_TEMPERATURE = 1e-30
LARGEST = float(np.finfo(np.float32).max)
# Replaces -inf, which JSON does not have, as in OpenAI's API.
LEAST_LOGPROB = -9999.0
# Most distributions have nearly all their mass above this, relative to the best logit.
NEAR = -8.0
# Group size of the k-th-largest search, which first looks only at the maximum of each group.
GROUP = 64
# Block size for drawing: sums of blocks of probabilities are searched before single ones.
BLOCK = 512


class TokenChoice(NamedTuple):
    """The inputs, besides the logits, that determine the token of one row."""

    row: int
    sampling: SamplingParams
    random: float | None  # in [0, 1); None: take the likeliest token
    forbidden: list[int]  # tokens that would end the request too early
    counts: TokenCounts | None  # None without penalties


def as_floats(row: Rows, is_bf16: bool) -> Floats:
    """Return a copy of a row of logits in single precision."""
    if is_bf16:
        return (row.astype(np.uint32) << 16).view(np.float32)
    return row.astype(np.float32)


def greedy(rows: Rows, is_bf16: bool) -> list[int]:
    """Return the likeliest token of each of `rows` [R, vocab_size]. Of equal ones, the first.

    `UNSOUND` for a row whose largest logit is NaN or infinite: it says nothing.

    Positive floats have the same order as their bits. So if any logit is positive, comparing 16-bit
    integers finds the largest bf16 logit without a conversion. In practice this is always so.
    """
    tokens = rows.argmax(axis=-1)
    best = rows[np.arange(len(rows)), tokens]
    if is_bf16:  # a NaN has the largest bits of its sign
        sound = (best > 0) & (best < 0x7F80) & (rows.view(np.uint16).max(axis=-1) <= 0xFF80)
    else:
        sound = np.isfinite(best)
    chosen: list[int] = tokens.tolist()
    if not sound.all():
        for row in np.flatnonzero(~sound).tolist():
            floats = as_floats(rows[row], is_bf16)
            chosen[row] = int(floats.argmax()) if np.isfinite(floats.max()) else UNSOUND
    return chosen


@np.errstate(over="ignore")  # overflow to inf or -inf is harmless here
def choose(logits: Floats, choice: TokenChoice) -> int:
    """Return the token of a row, or `UNSOUND`. Overwrites `logits` [vocab_size]."""
    if not np.isfinite(logits.max()):
        return UNSOUND
    sampling = choice.sampling
    if choice.counts is not None:
        penalise(logits, choice.counts, sampling)
    if choice.forbidden:
        before = logits[choice.forbidden]
        logits[choice.forbidden] = -np.inf
        if logits.max() == -np.inf:  # no other token is left
            logits[choice.forbidden] = before
    logits = _finite(logits)
    if choice.random is None:
        return int(logits.argmax())
    # Shifted first, so that a temperature close to 0 overflows to -inf and not to NaN.
    logits -= logits.max()
    logits /= np.float32(max(sampling.temperature, LEAST_TEMPERATURE))
    floor = _floor(logits, sampling)
    if floor == -np.inf:
        return _draw(np.exp(logits), choice.random)
    kept = np.flatnonzero(logits >= floor)
    return int(kept[_draw(np.exp(logits[kept]), choice.random)])


def penalise(logits: Floats, counts: TokenCounts, sampling: SamplingParams) -> None:
    """Lower the logits of tokens that have occurred in the request, in place.

    The repetition penalty is that of CTRL (Keskar et al., 2019, section 4.1), over prompt and
    output. Presence and frequency penalties are those of OpenAI's API, over the output.
    """
    values = logits[counts.token_ids]
    if sampling.repetition_penalty != 1.0:
        factor = np.float32(sampling.repetition_penalty)
        values = np.where(values > 0, values / factor, values * factor)
    values -= np.float32(sampling.frequency_penalty) * counts.counts
    values -= np.float32(sampling.presence_penalty) * (counts.counts > 0)
    logits[counts.token_ids] = values


@np.errstate(over="ignore")
def logprobs(logits: Floats, token_id: int, num_top: int) -> PositionLogprobs:
    """Return the logprobs of `token_id` and of the `num_top` likeliest tokens, before penalties.

    Of equally likely tokens, the first counts as better. A NaN logit counts as impossible, so no
    result is NaN.
    """
    logits = _finite(logits)
    peak = logits.max()
    logits = logits - peak
    total = float(np.log(np.exp(logits).sum(dtype=np.float64)))

    def named(token: int) -> TokenLogprob:
        return TokenLogprob(token, max(LEAST_LOGPROB, float(logits[token]) - total))

    better = logits > logits[token_id]
    return PositionLogprobs(
        named(token_id),
        1 + int(np.count_nonzero(better)),
        [named(token) for token in _best(logits, num_top)],
    )


def _best(logits: Floats, count: int) -> list[int]:
    count = min(count, len(logits))
    if not count:
        return []
    least = _kth_largest(logits, count)
    found = np.flatnonzero(logits > least)
    equal = np.flatnonzero(logits == least)[: count - len(found)]
    order = np.argsort(-logits[found], kind="stable")
    return [*found[order].tolist(), *equal.tolist()]


def _finite(logits: Floats) -> Floats:
    """Return logits with a finite maximum. NaN becomes -inf. If all are -inf, all become 0."""
    if np.isfinite(logits.max()):
        return logits
    logits = np.nan_to_num(logits, nan=-np.inf, posinf=LARGEST, neginf=-np.inf)
    return np.zeros_like(logits) if logits.max() == -np.inf else logits


def _floor(logits: Floats, sampling: SamplingParams) -> float:
    """Return the smallest logit that can be drawn, after min-p, then top-k, then top-p.

    The logits are divided by the temperature, with a maximum of 0. Tokens as likely as the last
    kept one are kept too, so that the sort order of equal tokens never matters.
    """
    floor = -np.inf
    if sampling.min_p > 0:
        floor = float(np.log(np.float32(sampling.min_p)))
    if 0 < sampling.top_k < len(logits):
        floor = max(floor, _kth_largest(logits, sampling.top_k))
    if sampling.top_p < 1:
        floor = max(floor, _top_p_floor(logits[logits >= floor], sampling.top_p))
    return floor


def _kth_largest(logits: Floats, k: int) -> float:
    """Return the k-th largest of `logits`, 1 <= k <= vocab_size.

    First, logits are split into groups. The k-th largest of the groups' maxima is a lower bound for
    the result, because at least k logits reach it. So two fast passes discard most logits.
    """
    num_groups = len(logits) // GROUP
    if k <= num_groups // 2:
        whole = num_groups * GROUP
        maxima = logits[:whole].reshape(GROUP, num_groups).max(axis=0)
        bound = np.partition(maxima, -k)[-k]
        logits = logits[logits >= bound]
    return float(np.partition(logits, -k)[-k])


def _top_p_floor(logits: Floats, top_p: float) -> float:
    """Return the smallest logit of the likeliest tokens whose probabilities together reach `top_p`.

    Sorts all logits only if those near the best one have too little mass.
    """
    wanted = top_p * float(np.exp(logits).sum(dtype=np.float64))
    for some in (logits[logits > NEAR], logits):
        ordered = np.sort(some)[::-1]
        cumulated = np.exp(ordered).cumsum(dtype=np.float64)
        if cumulated[-1] >= wanted:
            break
    return float(ordered[min(int(np.searchsorted(cumulated, wanted)), len(ordered) - 1)])


def _draw(probs: Floats, random: float) -> int:
    """Return a random index, drawn by inverse transform: cumulate `probs`, and find `random`."""
    num_whole = len(probs) // BLOCK * BLOCK
    sums = np.append(
        probs[:num_whole].reshape(-1, BLOCK).sum(axis=1), probs[num_whole:].sum()
    ).cumsum(dtype=np.float64)
    target = random * sums[-1]
    block = int(np.searchsorted(sums, target, side="right"))
    block = min(block, int(np.searchsorted(sums, sums[-1])))  # a target that rounds up to the total
    start = block * BLOCK
    within = probs[start : start + BLOCK].cumsum(dtype=np.float64)
    target -= sums[block - 1] if block else 0.0
    place = int(np.searchsorted(within, target, side="right"))
    return start + min(place, int(np.searchsorted(within, within[-1])))
