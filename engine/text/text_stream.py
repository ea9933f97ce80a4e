"""`TextStream`: decodes tokens as they arrive."""

from collections.abc import Callable, Container, Sequence

# Stands in decoded text for bytes that are not (yet) valid UTF-8.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Most replacements that an unfinished character shows as: one for each of three of its four bytes.
UNFINISHED = 3
# Tokens that a window may grow to, and tokens that are kept of a larger one.
LONGEST_WINDOW = 32
KEPT_WINDOW = 16


class TextStream:
    """Decodes the tokens of one request as they arrive.

    The texts that it returns, joined, are the text of all tokens, however they are divided among
    the calls. A character is returned once it is complete. Decoding uses a short window of tokens,
    because some tokenizers decode a token differently at the start of a text than inside it.

    Args:
        decode: returns the text of token ids. More tokens may only change the last character,
            while it is unfinished, and add to the text.
        without_text: ids that `decode` passes over.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], without_text: Container[int] = ()
    ) -> None:
        self.num_chars = 0  # length of the text so far. An unfinished character at its end counts.
        self._decode = decode
        self._without_text = without_text
        self._window: list[int] = []
        self._num_context = 0  # first tokens of the window whose text was returned completely
        self._num_given = 0  # characters of the window's text that were returned
        self._num_held = 0  # characters of the window's text that were not

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next tokens, and return the text that is now certain; may be empty."""
        self._window += [each for each in token_ids if each not in self._without_text]
        text = self._decode(self._window)
        certain = max(len(text.rstrip(REPLACEMENT)), len(text) - UNFINISHED)
        piece = text[self._num_given : certain]
        self.num_chars += len(text) - self._num_given - self._num_held
        self._num_given = max(self._num_given, certain)
        self._num_held = len(text) - self._num_given
        if not self._num_held:
            self._keep(self._window[self._num_context :])
        elif len(self._window) > LONGEST_WINDOW:
            self._keep(self._window[-KEPT_WINDOW:])
        return piece

    def push_token(self, token_id: int) -> tuple[str, int]:
        """Add one token, and return the text that is now certain, and where the token begins.

        The second is a number of characters from the beginning of the text: of the character that
        the token begins or goes on with.
        """
        begin, num_held = self.num_chars, self._num_held
        piece = self.push((token_id,))
        if num_held and token_id not in self._without_text:
            tail = piece + REPLACEMENT * self._num_held
            if len(tail) <= num_held or tail[num_held - 1] != REPLACEMENT:
                begin = min(begin, self.num_chars) - 1
        return piece, begin

    def finish(self) -> str:
        """Return the text that was held back; an unfinished character as replacement characters."""
        piece = self._decode(self._window)[self._num_given :]
        self._window.clear()
        self._num_context = self._num_given = self._num_held = 0
        return piece

    def _keep(self, window: list[int]) -> None:
        """Go on with the newest tokens of the window.

        At least one character of their text must be known, because a decoder may take spaces away
        from the beginning of a text, and from nowhere else.
        """
        text = self._decode(window)
        if text or len(self._window) > LONGEST_WINDOW:
            self._window = window
            self._num_context = len(window)
            self._num_given = max(0, len(text) - self._num_held)
