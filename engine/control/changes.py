"""`Changes`: passes commands that change the engine on to its thread. Use it on the control thread.

A client that lost its connection before the answer arrived sends the command again. It is still
applied only once: the answer to each change is kept, and the sender of a repeated command gets it,
as soon as there is one.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from stepscope.engine.control.remote_client import Outgoing, RemoteClient
from stepscope.engine.loop.inbox import Call, Inbox
from stepscope.engine.protocol.commands import Change
from stepscope.engine.protocol.replies import AnyReply
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.connections import Connections

MAX_ANSWERS = 16_384  # lasts for minutes, even if one client sends changes without pause
MAX_WAITING = 64  # senders of one repeated command that has no answer yet


@dataclass(slots=True)
class _KeptAnswer:
    digest: bytes  # of the command, kept in its place
    reply: AnyReply | None = None
    waiting: list[tuple[bytes, bytes]] = field(default_factory=list)  # identity, command id


class Changes:
    def __init__(
        self,
        inbox: Inbox,
        connections: Connections,
        post: Callable[[Outgoing], None],
        send: Callable[[bytes, bytes, AnyReply], None],
    ) -> None:
        self._inbox = inbox
        self._connections = connections
        self._post = post
        self._send = send
        # By client and the command's name; the oldest are dropped.
        self._answers: OrderedDict[tuple[bytes, bytes], _KeptAnswer] = OrderedDict()

    def apply(self, identity: bytes, command_id: bytes, command: Change, payload: bytes) -> None:
        """Handle a change. Raises ConfigError if its name belongs to another command."""
        # A name is valid for all connections of a key. Without keys, all clients are one user.
        # A command without a name is identified by its connection, id and content.
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        once = identity, command_id + digest
        if command.once:
            once = self._connections.key(identity), command.once.encode()
        kept = self._answers.get(once)
        if kept is None:
            self._answers[once] = _KeptAnswer(digest)
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
            account = self._connections.account(identity)
            client = RemoteClient(self._post, identity, command_id, once=once, account=account)
            asker = self._connections.asker(identity, command.who)
            self._inbox.put(Call(command, client, asker=asker, lane=account))
        elif kept.digest != digest:
            raise ConfigError(
                "once_reused", f"another command was sent as {command.once!r}; choose a new name"
            )
        elif kept.reply is not None:
            self._send(identity, command_id, kept.reply)
        elif len(kept.waiting) < MAX_WAITING:
            kept.waiting.append((identity, command_id))

    def answered(self, once: tuple[bytes, bytes], reply: AnyReply) -> None:
        """Keep the engine's answer to a change, and answer the repeated commands."""
        kept = self._answers.get(once)
        if kept is None or kept.reply is not None:
            return
        kept.reply = reply
        waiting, kept.waiting = kept.waiting, []
        for identity, command_id in waiting:
            self._send(identity, command_id, reply)
