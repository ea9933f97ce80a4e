"""`TextStream`: decodes tokens as they arrive; `StopText`: up to the first stop string.

A request must end in the step whose token completes a stop string; otherwise it would hold its
blocks and compute tokens in vain. So the engine's thread needs the text of these requests. It goes
into the `Output` as it is; the control thread only makes the text of all other requests.
"""

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


class StopText:
    """Makes the text of one request up to its first stop string.

    The first stop string is the one that is complete first; if several end at the same character,
    the longest. So the end of the text does not depend on how it is cut into tokens. Text that may
    begin a stop string is held back until it is known whether it does.

    `include_stop`: whether the text ends after the stop string, not before it.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str], include_stop: bool) -> None:
        self.stop: str | None = None  # the stop string that was found
        self._stream = stream
        self._stops = stops
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._include_stop = include_stop
        self._held = ""  # text that is held back
        self._ready: list[str] = []

    def push(self, token_id: int, armed: bool) -> None:
        """Add the next token; if `armed`, stop strings that it completes end the text."""
        self._scan(self._stream.push((token_id,)), armed)

    def finish(self, armed: bool) -> None:
        """End the text: release an unfinished character and the text that was held back."""
        if self.stop is not None:
            return
        self._scan(self._stream.finish(), armed)
        self._ready.append(self._held)
        self._held = ""

    def take(self) -> str:
        """Return the text that is certain and was not returned before."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _scan(self, piece: str, armed: bool) -> None:
        if not self._held and self._first_chars.isdisjoint(piece):
            self._ready.append(piece)
            return
        num_held, text = len(self._held), self._held + piece
        if armed:
            # Where each begins that ends in this piece; what ended before it did not count.
            begins = {
                stop: text.find(stop, max(0, num_held - len(stop) + 1)) for stop in self._stops
            }
            ends = [(at + len(stop), at, stop) for stop, at in begins.items() if at >= 0]
            if ends:
                end, begin, self.stop = min(ends)
                self._ready.append(text[: end if self._include_stop else begin])
                self._held = ""
                return
        num_kept = max(_num_begun(text, stop) for stop in self._stops)
        given = len(text) - num_kept
        self._ready.append(text[:given])
        self._held = text[given:]


def _num_begun(text: str, stop: str) -> int:
    """Return the length of the longest end of the text with which the stop string may begin."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
