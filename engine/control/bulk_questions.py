"""`BulkQuestions`: handles queries with large answers, such as snapshots and replays.

Use it on the control thread.
"""

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from stepscope.engine.control.bulk_replies import BulkReplies, at_once, replayed
from stepscope.engine.control.remote_client import RemoteClient
from stepscope.engine.control.served_engine import ServedEngine
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import GetAudit, GetKeptSnapshot, GetSnapshot, ReplayFrom
from stepscope.engine.protocol.replies import Error, Replayed
from stepscope.engine.protocol.settings.knobs import ConfigError

BulkQuestion: TypeAlias = ReplayFrom | GetSnapshot | GetKeptSnapshot | GetAudit


class BulkQuestions:
    """Gets the answers to large queries. `BulkReplies` then encodes and sends them.

    Args:
        engine: answers queries for snapshots and the audit trail.
        replay: returns messages of the replay ring (`Publisher.replay`).
        replies: encodes and sends the answers on its own thread.
    """

    def __init__(
        self, engine: ServedEngine, replay: Callable[[int, int], Replayed], replies: BulkReplies
    ) -> None:
        self._engine = engine
        self._replay = replay
        self._replies = replies

    def take(self, command: BulkQuestion, client: RemoteClient) -> None:
        """Start to answer a query.

        Raises ConfigError if the client has too many unanswered queries.
        """
        account = client.account
        if not self._replies.reserve(account):
            raise ConfigError("rate_limited", "too much of what you asked waits to be answered")
        if isinstance(command, ReplayFrom):
            parts = replayed(self._replay, command.sequence, command.limit)
            self._replies.answer(account, client, parts)
        elif isinstance(command, GetKeptSnapshot):
            self._replies.answer(account, client, at_once(self._kept_snapshot(command)))
        else:
            self._engine.inbox.put(Call(command, client, lane=account))

    def _kept_snapshot(self, command: GetKeptSnapshot) -> msgspec.Raw | Error:
        ring = self._replay(0, 0)
        payload = self._engine.kept_snapshots.before(
            round(command.past_s * 1e9),
            self._engine.clock(),
            self._engine.last_step,
            ring.oldest_sequence,
            ring.next_sequence,
        )
        if payload is None:
            return Error(code="nothing_kept", message="the engine keeps no snapshot from that time")
        return msgspec.Raw(payload)
