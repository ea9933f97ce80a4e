"""`StepSamples`: the newest steps of every shape seen, to fit a model of step times on.

A plain window of the newest steps would not do: an engine that serves one load for an hour would
fill it with equal steps, and displace the steps of other loads. So a few steps of each shape are
kept.
"""

from collections import Counter, deque
from itertools import zip_longest

from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.simulation.fitted import FittedModel, SeenStep, fit

_OF_A_KIND = 8
_EVERY = 4  # once a kind is full, only one of so many of its steps is kept


class StepSamples:
    """Keeps the newest steps of each kind.

    Steps are of one kind if both their prefill tokens and their decodes round to the same powers of
    two. There are at most some 150 kinds.
    """

    def __init__(self) -> None:
        self._by_kind: dict[tuple[int, int], deque[SeenStep]] = {}
        self._num_seen: Counter[tuple[int, int]] = Counter()

    def add(self, step: SeenStep) -> None:
        shape = step.shape
        kind = shape.num_prefill_tokens.bit_length(), shape.num_decodes.bit_length()
        kept = self._by_kind.setdefault(kind, deque(maxlen=_OF_A_KIND))
        self._num_seen[kind] += 1
        if len(kept) < _OF_A_KIND or self._num_seen[kind] % _EVERY == 0:
            kept.append(step)

    def fit(self) -> FittedModel | None:
        """Fit a model; None if the steps are too few or too much alike."""
        # Interleave the kinds, because a fit predicts each stretch of its steps from the others.
        rounds = zip_longest(*self._by_kind.values())
        try:
            return fit([step for each in rounds for step in each if step is not None])
        except ConfigError:
            return None
