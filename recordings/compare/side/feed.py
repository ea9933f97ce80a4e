"""What a `Side` is fed from: the seam between reducing a run and knowing where it is kept."""

from typing import NamedTuple, Protocol

from stepscope.recordings.compare.side.side import Side

BATCH = 64  # messages between two looks at the clock


class Stretch(NamedTuple):
    """Steps from `first` to `last`, both included; None is the end of what there is."""

    first: int | None = None
    last: int | None = None


class Feed(Protocol):
    """Fills one side. Only one thread may use it; any thread may read its attributes.

    Attributes:
        side: None until something was read.
        share: how much has been read, 0..1; None for a session that goes on.
        is_done: nothing more will come.
        note: what is missing or went wrong, in one line.
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
        """Read until that time of `time.monotonic`. Returns whether anything was read."""
        ...

    def close(self) -> None: ...
