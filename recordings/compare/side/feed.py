"""`Feed`: reads a run from a file or from memory into a `Side`, which does not know the source."""

from typing import Protocol

from stepscope.recordings.compare.side.side import Side

BATCH = 64  # messages between two checks of the clock


class Feed(Protocol):
    """Reads one of the two compared runs into its `Side`.

    Only one thread may call `read`; any thread may read the attributes.

    Attributes:
        side: the run as read so far; None until something was read.
        share: how much has been read, 0..1; None for a live session with nothing more to read.
        is_done: whether no more messages will come.
        note: what is missing or went wrong, in one line; None if nothing.
    """

    name: str

    @property
    def side(self) -> Side | None: ...

    @property
    def share(self) -> float | None: ...

    @property
    def is_done(self) -> bool: ...

    @property
    def note(self) -> str | None: ...

    def read(self, until_s: float) -> bool:
        """Read until `time.monotonic()` reaches `until_s`. Returns whether anything was read."""
        ...

    def close(self) -> None: ...
