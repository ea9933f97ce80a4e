"""Notes how far back the engine could replay, each time that it was asked.

What a subscriber has not got although the engine still had it when it was asked is a bug.
"""

from typing import IO

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.replies import Replayed
from stepscope.recordings.live.gap_recovery import GapRecovery


def note_replays(log: IO[str]) -> None:
    """From now on, each answer that a subscriber of this process goes by is a line
    `replay FROM END OLDEST`: it says of all messages before END what there was of them. So is the
    end of what is held of an engine that is gone: there is nothing any more."""
    replay, end = GapRecovery._replay, GapRecovery.end

    def noting(recovery: GapRecovery, client: ControlClient, sequence: int, limit: int) -> Replayed:
        replayed = replay(recovery, client, sequence, limit)
        frames, oldest = replayed.frames, replayed.oldest_sequence
        reach = max(oldest, frames[-1].sequence + 1 if frames else sequence + limit)
        log.write(f"replay {sequence} {reach} {oldest}\n")
        return replayed

    def noting_end(recovery: GapRecovery) -> None:
        if held := recovery._buffered:
            log.write(f"replay {recovery._next_sequence} {held.newest} {held.newest}\n")
        end(recovery)

    GapRecovery._replay = noting  # type: ignore[method-assign]
    GapRecovery.end = noting_end  # type: ignore[method-assign]
