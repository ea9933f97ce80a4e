"""Writes down how far back the engine could replay, each time that it was asked.

What a subscriber has not got although the engine still had it when it was asked is a bug.
"""

from typing import IO

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Replayed
from stepscope.recordings.live.gap_recovery import Healing


def note_replays(log: IO[str]) -> None:
    """From now on, each answer that a subscriber of this process goes by is a line
    `replay FROM END OLDEST`: it says of all messages before END what there was of them. So is the
    end of what is held of an engine that is gone: there is nothing any more."""
    replay, end = Healing._replay, Healing.end

    def noting(healing: Healing, client: ControlClient, sequence: int, limit: int) -> Replayed:
        replayed = replay(healing, client, sequence, limit)
        frames, oldest = replayed.frames, replayed.oldest_sequence
        reach = max(oldest, frames[-1].sequence + 1 if frames else sequence + limit)
        log.write(f"replay {sequence} {reach} {oldest}\n")
        return replayed

    def noting_end(healing: Healing) -> None:
        if held := healing._held:
            log.write(f"replay {healing._next_sequence} {held.newest} {held.newest}\n")
        end(healing)

    Healing._replay = noting  # type: ignore[method-assign]
    Healing.end = noting_end  # type: ignore[method-assign]
