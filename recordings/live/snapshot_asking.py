"""Snapshots of an engine that is joined: what it is like now, and what it was like before."""

import logging
import threading
import time

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import CommandRefused, EngineUnreachable
from stepscope.engine.protocol.commands import Error, GetSnapshot, Replayed, ReplayFrom
from stepscope.engine.protocol.wire import Snapshot

log = logging.getLogger("stepscope.recordings")

ASK_AGAIN_S = 0.4  # an answer may have been on a connection that was lost
SNAPSHOT_AGAIN_S = 4.0  # ... a snapshot is larger, and waits for the end of a step
SNAPSHOT_TIMEOUT_S = 30.0
MAX_CATCH_UP_S = 4.0  # that what was before may delay what is
NUM_TRIED = 100  # messages, to see how fast they come
MIN_PAST_S = 1.0  # is not asked for less
_POLL_S = 0.05


def ask_for_snapshot(client: ControlClient, stopping: threading.Event) -> Snapshot:
    """What the engine is like now. It is taken between two steps, and a step may be long.

    Args:
        stopping: set when it is not to be waited for any more.

    Raises:
        EngineUnreachable: nobody gave one in time.
        CommandRefused: the engine will not, or has answered something else.
    """
    client.info(ASK_AGAIN_S)  # is quick, and tells whether there is anybody at all
    now_s = next_ask_s = time.monotonic()
    deadline_s = now_s + SNAPSHOT_TIMEOUT_S
    wanted: set[int] = set()
    while (now_s := time.monotonic()) < deadline_s and not stopping.is_set():
        if now_s >= next_ask_s:
            wanted.add(client.send(GetSnapshot()))
            next_ask_s = now_s + SNAPSHOT_AGAIN_S
        received = client.receive(_POLL_S)
        if received is None or received[0] not in wanted:
            continue
        reply = received[1]
        if isinstance(reply, Snapshot):
            return reply
        if isinstance(reply, Error):
            raise CommandRefused(reply.code, reply.message)
        raise CommandRefused(
            "protocol",
            f"{client.endpoint.control} answered with {type(reply).__name__}, not a Snapshot",
        )
    raise EngineUnreachable(
        f"{client.endpoint.control} gave no snapshot within {SNAPSHOT_TIMEOUT_S:g} s"
    )


def ask_for_earlier(
    client: ControlClient, now: Snapshot, past_s: float, stopping: threading.Event
) -> Snapshot | None:
    """What the same engine was like about `past_s` before `now`, ...

    or less, where the way is so slow that what has happened since would be long in coming.

    Args:
        stopping: set when it is not to be waited for any more.

    Returns:
        None where it keeps no such, or does not give it in time: the present is worth more.
    """
    if not now.info.keeps_snapshots:
        return None
    try:
        return _ask_for_earlier(client, now, past_s, stopping)
    except (EngineUnreachable, CommandRefused) as error:
        log.warning("%s gives nothing of before: %s", client.endpoint.control, error)
        return None


def _ask_for_earlier(
    client: ControlClient, now: Snapshot, past_s: float, stopping: threading.Event
) -> Snapshot | None:
    while past_s >= MIN_PAST_S and not stopping.is_set():
        earlier = client.kept_snapshot(past_s)
        if earlier is None or earlier.info.engine_id != now.info.engine_id:
            return None
        num_messages = now.sequence - earlier.sequence
        if num_messages <= 0:
            return None
        if catch_up_s(client, earlier.sequence + 1, num_messages) <= MAX_CATCH_UP_S:
            return earlier
        past_s /= 2
    return None


def catch_up_s(client: ControlClient, first: int, num_messages: int) -> float:
    """How long all of them will be on the way, judged by a few.

    Raises:
        EngineUnreachable: not even those came in time.
        CommandRefused: the engine gives none.
    """
    start_s = time.monotonic()
    answer = client.ask(ReplayFrom(sequence=first, limit=min(num_messages, NUM_TRIED)))
    took_s = time.monotonic() - start_s
    num_tried = len(answer.frames) if isinstance(answer, Replayed) else 0
    return took_s * num_messages / max(1, num_tried)
