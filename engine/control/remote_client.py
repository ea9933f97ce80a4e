"""`RemoteClient`: receives the engine's answers to one command that came by the control socket."""

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from stepscope.engine.protocol.replies import AnyReply
from stepscope.engine.text.output_text import OutputText


class RemoteClient:
    """The receiver of the answers to one command, at the client that sent it.

    Args:
        post: queues a reply, from any thread.
        identity: the client's connection.
        command_id: the client's id for the command.
        text: adds the text to the outputs of a `Submit`.
        once: for a change, its key in `AnswerBook`.
        bundles: whether outputs may be sent in one message with other outputs.
        account: identifies the client, on all of its connections. They share one lane of the
            engine's inbox.
        is_bulk: whether `BulkReplies` sends the answer.
    """

    def __init__(
        self,
        post: Callable[["Outgoing"], None],
        identity: bytes,
        command_id: bytes,
        text: OutputText | None = None,
        once: tuple[bytes, bytes] | None = None,
        bundles: bool = False,
        account: bytes = b"",
        is_bulk: bool = False,
    ) -> None:
        self._post = post
        self.identity = identity
        self.command_id = command_id
        self.text = text
        self.once = once
        self.bundles = bundles
        self.account = account or identity
        self.is_bulk = is_bulk

    def reply(self, message: AnyReply) -> None:
        self._post((self, message))


# A reply for the thread that owns the socket. The engine's thread builds one for each token, and a
# plain tuple takes a tenth of the time of a class.
Outgoing: TypeAlias = tuple[RemoteClient, AnyReply | msgspec.Raw]
