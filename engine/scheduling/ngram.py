"""`NgramProposer`: guesses the next tokens of a request from its own text (prompt lookup).

If the newest tokens occurred earlier in the text, the tokens that followed them there are the
guess. Text that copies (a quoted document, edited code) repeats itself; a chat seldom does.

The method is prompt lookup decoding (Saxena, 2023), with vLLM's rule: it looks for the longest
run of newest tokens, at most `prompt_lookup_max`, that occurred before. If that run occurred
several times, the earliest occurrence gives the guess.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.scheduling.request import Request

# Tokens that are indexed in one step, for all requests together: about 5 ms for each length.
MAX_INDEXED_TOKENS = 32_768


@dataclass(slots=True)
class _Ngrams:
    """Index of the n-grams of one request, except those at its end, which no token follows."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> where it first ends
    num_tokens: int = 0  # n-grams that end here or earlier are in `ends`


@dataclass(eq=False)
class NgramProposer:
    """Keeps an index of n-grams of `shortest` to `longest` tokens for each request."""

    shortest: int
    longest: int
    num_tokens: int
    _ngrams: WeakKeyDictionary[Request, _Ngrams] = field(default_factory=WeakKeyDictionary)
    _num_left: int = MAX_INDEXED_TOKENS

    @classmethod
    def for_knobs(cls, knobs: Knobs, before: "NgramProposer | None") -> "NgramProposer | None":
        """Return a proposer for these knobs; None if they switch speculative decoding off.

        Args:
            before: the proposer used so far. It is reused if it indexes n-grams of the same
                lengths.
        """
        if knobs.speculative == "off":
            return None
        lengths = knobs.prompt_lookup_min, knobs.prompt_lookup_max
        if before is None or (before.shortest, before.longest) != lengths:
            return cls(*lengths, knobs.num_speculative_tokens)
        before.num_tokens = knobs.num_speculative_tokens
        return before

    def begin_step(self) -> None:
        self._num_left = MAX_INDEXED_TOKENS

    def propose(self, request: Request, most: int) -> list[int]:
        """Guess up to `most` tokens after the newest one; the list may be empty.

        Leaves room within `max_tokens` for the token sampled after the last guess. Requests with
        penalties get no guesses, because each token changes the odds of the next one. Requests with
        logprobs get none either.
        """
        tokens = request.token_ids
        most = min(most, self.num_tokens, request.max_num_tokens - len(tokens) - 1)
        if most <= 0 or request.has_penalties or request.sampling.logprobs is not None:
            return []
        ngrams = self._ngrams.get(request)
        if ngrams is None:
            ngrams = self._ngrams[request] = _Ngrams()
        if not self._catch_up(ngrams, tokens):
            return []
        for length in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            end = ngrams.ends.get(tuple(tokens[-length:]))
            if end is not None:
                return tokens[end : end + most]
        return []

    def _catch_up(self, ngrams: _Ngrams, tokens: list[int]) -> bool:
        """Index new tokens; False if some are left after `MAX_INDEXED_TOKENS` in this step."""
        first = ngrams.num_tokens
        last = min(len(tokens) - 1, first + self._num_left)
        self._num_left -= last - first
        for length in range(self.shortest, self.longest + 1):
            begin = max(0, first + 1 - length)
            if begin + length > last:
                continue  # too few tokens yet
            columns = [tokens[begin + i : last - length + 1 + i] for i in range(length)]
            for end, ngram in enumerate(zip(*columns, strict=True), begin + length):
                ngrams.ends.setdefault(ngram, end)
        ngrams.num_tokens = last
        return last == len(tokens) - 1
