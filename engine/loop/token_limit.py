"""`TokenLimit`: limits the size of steps for a while after a step ran out of device memory.

The runner repeats such a step in halves, but each failed attempt costs time. So the next steps are
no larger than the largest part that ran. After some steps the limit is lifted, because memory that
another program took may be free by then. If a step then fails again, the limit holds for twice as
many steps.
"""

import logging

log = logging.getLogger("stepscope.engine")

FIRST_HOLD = 256  # steps
LAST_HOLD = 16_384


class TokenLimit:
    """The current limit (`tokens`, None: no limit). Belongs to the engine's thread."""

    def __init__(self) -> None:
        self.tokens: int | None = None
        self._left = 0  # steps until the limit is lifted
        self._hold = FIRST_HOLD
        self._tried = 0  # the size that did not run; 0 once such a size has run again

    @property
    def is_on_trial(self) -> bool:
        """Whether the limit was lifted, but no step of the size that failed has run since."""
        return self.tokens is None and self._tried > 0

    def note(self, num_tokens: int, num_tokens_fit: int | None) -> None:
        """Take account of a step. `num_tokens_fit`: its largest part that ran; None: the whole."""
        if num_tokens_fit is not None:
            self._hold_to(max(1, num_tokens_fit), num_tokens)
        elif self.tokens is not None:
            self._left -= 1
            if not self._left:
                log.info("steps of more than %d tokens are tried again", self.tokens)
                self.tokens = None
        elif num_tokens >= self._tried:
            self._hold, self._tried = FIRST_HOLD, 0  # there is memory again

    def _hold_to(self, tokens: int, num_tokens: int) -> None:
        if self._tried:
            self._hold = min(2 * self._hold, LAST_HOLD)
        self.tokens, self._left, self._tried = tokens, self._hold, num_tokens
        log.warning(
            "a step of %d tokens ran out of device memory and was run in parts; the next %d steps "
            "have at most %d tokens; lower max_num_batched_tokens to avoid it",
            num_tokens,
            self._hold,
            tokens,
        )
