"""`StopText`: the text of a request that has stop strings, made on the engine's thread.

A request must end in the step whose token completes a stop string; otherwise it would hold its
blocks and compute tokens in vain. So the engine's thread needs the text of these requests. It goes
into the `Output` as it is; the control thread only makes the text of all other requests.
"""

from collections import deque
from collections.abc import Sequence

from stepscope.engine.text.text_stream import TextStream


class StopMatcher:
    """Finds several strings at once in a text that arrives in parts (Aho and Corasick, 1975).

    A state stands for the longest suffix of the text so far that is also a prefix of one of the
    strings. The depth of the state is the length of that suffix: so many characters must be held
    back. Each character takes one step, however many strings there are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fall_back: list[int] = [0]  # the longest proper end of a state that is also a state
        self.depth: list[int] = [0]
        self.found: list[str | None] = [None]  # the longest string that ends in this state
        for stop in stops:
            state = 0
            for char in stop:
                state = self.next[state].setdefault(char, len(self.next))
                if state == len(self.next):
                    self._add_state()
            self.found[state] = stop
        self._link()
        self.first_chars = frozenset(self.next[0])

    def step(self, state: int, char: str) -> int:
        """Return the state that follows `state` when the text continues with `char`."""
        following = self.next[state].get(char)
        while following is None and state:
            state = self.fall_back[state]
            following = self.next[state].get(char)
        return following or 0

    def _add_state(self) -> None:
        self.next.append({})
        self.fall_back.append(0)
        self.depth.append(0)
        self.found.append(None)

    def _link(self) -> None:
        """Fill in `depth` and `fall_back`, breadth first: a state falls back to a shorter one."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for char, child in self.next[state].items():
                self.depth[child] = self.depth[state] + 1
                if state:
                    self.fall_back[child] = self.step(self.fall_back[state], char)
                if self.found[child] is None:
                    self.found[child] = self.found[self.fall_back[child]]
                queue.append(child)


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
        self._matcher = StopMatcher(stops)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""  # text that is held back, as long as the depth of `_state`
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
        self._state = 0

    def take(self) -> str:
        """Return the text that is certain and was not returned before."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _scan(self, piece: str, armed: bool) -> None:
        matcher = self._matcher
        state = self._state
        if not state and matcher.first_chars.isdisjoint(piece):
            self._ready.append(piece)
            return
        step, found = matcher.step, matcher.found
        text = self._held + piece
        for at, char in enumerate(piece, len(self._held) + 1):
            state = step(state, char)
            stop = found[state]
            if stop is None:
                continue
            if armed:
                self.stop = stop
                self._ready.append(text[: at if self._include_stop else at - len(stop)])
                self._held = ""
                return
            # It did not count, so hold back only what could begin another stop string.
            while found[state] is not None and not matcher.next[state]:
                state = matcher.fall_back[state]
        self._state = state
        given = len(text) - matcher.depth[state]
        self._ready.append(text[:given])
        self._held = text[given:]
