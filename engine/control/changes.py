"""`Changes`: handles commands that change the engine. Use it on the control thread.

If a client sends a command again, it is still applied only once. A change without effect is
answered by the control thread. Every other change goes to the engine's thread, and `answered`
receives the answer.
"""

from collections.abc import Callable

from stepscope.engine.control.answers import AnswerBook, OnceReused, digest_of
from stepscope.engine.control.remote_client import Outgoing, RemoteClient
from stepscope.engine.loop.inbox import Call, Denial, Inbox, Settled
from stepscope.engine.protocol.asker import Asker
from stepscope.engine.protocol.commands import Change
from stepscope.engine.protocol.replies import AnyReply, Error
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.connections import Connections


class Changes:
    """Handles changes of clients that may change the engine.

    Args:
        inbox: the queue to the engine's thread.
        settled: answers a change without effect. See `ServedEngine`.
        connections: tell which client sent a command.
        post: queues a reply, from any thread.
        send: sends a reply at once.
    """

    def __init__(
        self,
        inbox: Inbox,
        settled: Callable[[Change, Asker, bool], Settled | None],
        connections: Connections,
        post: Callable[[Outgoing], None],
        send: Callable[[bytes, bytes, AnyReply], None],
    ) -> None:
        self._inbox = inbox
        self._settled = settled
        self._connections = connections
        self._post = post
        self._send = send
        self._answers: AnswerBook[RemoteClient] = AnswerBook()
        self._num_on_their_way = 0  # changes that the engine has not answered yet

    def take(self, identity: bytes, command_id: bytes, command: Change, payload: bytes) -> None:
        """Handle a change.

        Raises:
            ConfigError: the client sent another command under the same name before.
        """
        # A name is valid for all connections of a key. Without keys, all clients are one user.
        # A command without a name is identified by its connection, id and content.
        if command.once:
            once = (self._connections.key(identity), command.once.encode())
        else:
            once = (identity, command_id + digest_of(payload))
        account = self._connections.account(identity)
        client = RemoteClient(self._post, identity, command_id, once=once, account=account)
        try:
            is_new = self._answers.is_new(once, payload, client)
        except OnceReused:
            raise ConfigError(
                "once_reused", f"another command was sent as {command.once!r}; choose a new name"
            ) from None
        if not is_new:
            self._answer_again(once)
            return
        asker = self._connections.asker(identity, command.who)
        settled = self._settled(command, asker, self._num_on_their_way == 0)
        if settled is None:
            self._num_on_their_way += 1
            self._inbox.put(Call(command, client, asker=asker, lane=account))
            return
        reply, is_audited = settled
        if is_audited and isinstance(reply, Error):
            name = type(command).__name__
            self._inbox.put(Denial(asker, name, reply.code, reply.message, lane=account))
        self._send(identity, command_id, reply)
        self._keep(once, reply)

    def answered(self, once: tuple[bytes, bytes], reply: AnyReply) -> None:
        """Keep the engine's answer to a change, and answer the repeated commands.

        The client that sent the change first already has the answer.
        """
        self._num_on_their_way -= 1
        self._keep(once, reply)

    def _keep(self, once: tuple[bytes, bytes], reply: AnyReply) -> None:
        self._answers.answered(once, reply)
        self._answer_again(once)

    def _answer_again(self, once: tuple[bytes, bytes]) -> None:
        for client, reply in self._answers.take_ready(once):
            self._send(client.identity, client.command_id, reply)
