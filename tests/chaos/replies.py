"""Writes down how far back the engine could replay, each time that it was asked.

What a subscriber has not got although the engine still had it when it was asked is a bug.
"""

from typing import IO

from stepscope.engine.client import ControlClient
from stepscope.engine.commands import Replayed
from stepscope.recordings.healing import Healing


def note_replays(log: IO[str]) -> None:
    """From now on, each answer that a subscriber of this process goes by is a line
    `replay FROM OLDEST`."""
    replay = Healing._replay

    def noting(healing: Healing, client: ControlClient, sequence: int, limit: int) -> Replayed:
        replayed = replay(healing, client, sequence, limit)
        log.write(f"replay {sequence} {replayed.oldest_sequence}\n")
        return replayed

    Healing._replay = noting  # type: ignore[method-assign]
