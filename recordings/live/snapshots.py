"""Asks an engine for snapshots: the current one, or an earlier one that the engine keeps."""

import logging
import threading
import time

from stepscope.engine.client.client import CommandRefused, ControlClient, EngineUnreachable
from stepscope.engine.protocol.commands import GetSnapshot, ReplayFrom
from stepscope.engine.protocol.replies import Error, Replayed
from stepscope.engine.protocol.wire import Snapshot

log = logging.getLogger("stepscope.recordings")

ASK_AGAIN_S = 0.4  # repeat a question then: the answer may be lost with a connection
SNAPSHOT_AGAIN_S = 4.0  # the same for snapshots, which are larger and wait for a step to end
SNAPSHOT_TIMEOUT_S = 30.0
BUSY_S = 1.0  # after so long, the engine is assumed to be in a long step
MAX_CATCH_UP_S = 4.0  # most that earlier messages may delay live ones
NUM_TRIED = 100  # messages to fetch to measure the speed
MIN_PAST_S = 1.0  # do not ask for less than this
_POLL_S = 0.05


def ask_for_snapshot(
    client: ControlClient, stopping: threading.Event, known_id: str | None = None
) -> Snapshot:
    """Ask for a current snapshot. The engine takes it between two steps, so the call may take long.

    If the engine is in a long step and the caller has none of its messages yet, the newest snapshot
    that the engine keeps is returned instead, because the messages since then can be replayed.

    `known_id`: id of the engine whose messages the caller already has.

    Raises:
        EngineUnreachable: no answer in time, or `stopping` was set.
        CommandRefused: the engine refused, or answered with something else.
    """
    info = client.info(ASK_AGAIN_S)  # this is quick and shows whether the engine answers at all
    takes_kept = info.keeps_snapshots and info.engine_id != known_id
    now_s = next_ask_s = time.monotonic()
    busy_s = now_s + BUSY_S
    deadline_s = now_s + SNAPSHOT_TIMEOUT_S
    wanted: set[int] = set()
    while (now_s := time.monotonic()) < deadline_s and not stopping.is_set():
        if now_s >= next_ask_s:
            wanted.add(client.send(GetSnapshot()))
            next_ask_s = now_s + SNAPSHOT_AGAIN_S
        if takes_kept and now_s >= busy_s:
            takes_kept = False
            kept = client.kept_snapshot(0.0)
            if kept is not None:
                return kept
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
    """Ask for a snapshot from about `past_s` seconds before `now`, of the same engine.

    If replaying the messages since then would take too long, a later snapshot is asked for. Returns
    None if the engine keeps no such snapshot, `stopping` is set, or the connection is too slow:
    live messages matter more.
    """
    try:
        while now.info.keeps_snapshots and past_s >= MIN_PAST_S and not stopping.is_set():
            earlier = client.kept_snapshot(past_s)
            if earlier is None or earlier.info.engine_id != now.info.engine_id:
                return None
            num_messages = now.sequence - earlier.sequence
            if num_messages <= 0:
                return None
            if catch_up_s(client, earlier.sequence + 1, num_messages) <= MAX_CATCH_UP_S:
                return earlier
            past_s /= 2
    except (EngineUnreachable, CommandRefused) as error:
        log.warning("%s gives no older steps: %s", client.endpoint.control, error)
    return None


def catch_up_s(client: ControlClient, first: int, num_messages: int) -> float:
    """Estimate how many seconds it takes to fetch `num_messages`, by fetching some of them.

    Raises:
        EngineUnreachable: even these did not come in time.
        CommandRefused: the engine replays none.
    """
    start_s = time.monotonic()
    answer = client.ask(ReplayFrom(sequence=first, limit=min(num_messages, NUM_TRIED)))
    took_s = time.monotonic() - start_s
    num_tried = len(answer.frames) if isinstance(answer, Replayed) else 0
    return took_s * num_messages / max(1, num_tried)
