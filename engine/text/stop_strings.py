"""`StopText`: the text of a request that has stop strings, made on the engine's thread.

A request must end in the step whose token completes a stop string; otherwise it would hold its
blocks and compute tokens in vain. So the engine's thread needs the text of these requests. It goes
into the `Output` as it is; the control thread only makes the text of all other requests.
"""

from collections.abc import Sequence

from stepscope.engine.text.text_stream import TextStream


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
