"""`TokenLimit`: for how long steps are held to a size that the device has memory for.

A step that runs out of memory is run all the same, in halves, but every such step costs attempts
that fail. So its size is remembered: the next steps are no larger than what did run. After a while
a larger one is tried again, for memory that another program took may be free by then; each time
that fails, the while is twice as long.
"""

import logging

log = logging.getLogger("stepscope.engine")

FIRST_HOLD = 256  # steps
LAST_HOLD = 16_384


class TokenLimit:
    """Belongs to the engine's thread.

    Attributes:
        tokens: of a step at most; None: there is no limit.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None
        self._left = 0  # steps until it is lifted
        self._hold = FIRST_HOLD
        self._tried = 0  # the size that did not run

    @property
    def is_on_trial(self) -> bool:
        """It was lifted, and it is not known yet whether there is memory again."""
        return self.tokens is None and self._tried > 0

    def note(self, num_tokens: int, num_tokens_fit: int | None) -> None:
        """A step of so many tokens has run, in parts of at most `num_tokens_fit` (None: whole)."""
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
