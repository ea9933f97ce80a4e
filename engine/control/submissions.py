"""What clients want of the engine, on its way into the inbox: `Submissions` and `Changes`.

Short prompts are tokenised at once. Long ones take up to seconds, so two other threads tokenise
them: the control thread has to send all replies meanwhile.
"""

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from stepscope.engine.control.intake import Intake, num_chars
from stepscope.engine.control.remote_client import RemoteClient
from stepscope.engine.loop.inbox import Call, Inbox, Refusal
from stepscope.engine.protocol.commands import Change, Submit
from stepscope.engine.protocol.replies import AnyReply, Error
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.connections import Connections

log = logging.getLogger("stepscope.engine")

LONG_TEXT = 16_384  # characters; tokenising this many takes some 10 ms
MAX_LONG = 64  # long prompts that wait or are being tokenised
NUM_THREADS = 2  # that tokenise long prompts
_TURN_CHARS = 64  # a turn of a conversation counts as its text and this many characters


class Submissions:
    """Accepts prompts (`Submit` commands) of all clients. Use it on the control thread.

    `charge_text`: called with the client and the number of characters that were tokenised on the
    control thread, for the client's rate limit.
    """

    def __init__(
        self,
        inbox: Inbox,
        intake: Intake,
        clock: Callable[[], int],
        charge_text: Callable[[bytes, int], None],
    ) -> None:
        self._inbox = inbox
        self._intake = intake
        self._clock = clock
        self._charge_text = charge_text
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenising")
        self._num_long = 0
        self._wanted: dict[bytes, set[bytes]] = {}  # commands with a long prompt, by identity
        self._lock = threading.Lock()  # of the two before it

    def close(self) -> None:
        """Drop all prompts that wait to be tokenised, and end the threads."""
        with self._lock:
            self._wanted.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def accept(self, command: Submit, client: RemoteClient) -> None:
        """Accept a prompt. Raises ConfigError if it is invalid, or too many long ones wait."""
        size = num_chars(command) + _TURN_CHARS * len(command.messages or ())
        if size <= LONG_TEXT:
            self._charge_text(client.account, size)
            self._inbox.put(self._prepared(command, client))
            return
        with self._lock:
            if self._num_long >= MAX_LONG:
                message = f"{MAX_LONG} long prompts already wait to be tokenised; try again later"
                raise ConfigError("queue_full", message)
            self._num_long += 1
            self._wanted.setdefault(client.identity, set()).add(client.command_id)
        self._threads.submit(self._tokenise, command, client)

    def forget(self, identity: bytes) -> None:
        """Drop the waiting prompts of a client that is gone; one in work is dropped at its end."""
        with self._lock:
            self._wanted.pop(identity, None)

    def _prepared(self, command: Submit, client: RemoteClient) -> Call:
        try:
            return self._intake.call(command, client, self._clock, client.account)
        except ConfigError as error:
            self._inbox.put(Refusal(command.client_id, str(error), lane=client.account))
            raise

    def _tokenise(self, command: Submit, client: RemoteClient) -> None:
        """Tokenise a long prompt, unless nobody wants it any more."""
        made: Call | Error | None = None
        if client.command_id in self._wanted.get(client.identity, ()):
            made = self._prepared_long(command, client)
        with self._lock:
            self._num_long -= 1
            wanted = self._wanted.get(client.identity, set())
            is_wanted = client.command_id in wanted
            wanted.discard(client.command_id)
            if is_wanted and isinstance(made, Call):
                self._inbox.put(made)
            elif is_wanted and isinstance(made, Error):
                client.reply(made)

    def _prepared_long(self, command: Submit, client: RemoteClient) -> Call | Error:
        try:
            return self._prepared(command, client)
        except ConfigError as error:
            return Error(code=error.code, message=str(error))
        except Exception:
            log.exception("a long prompt could not be tokenised")
            return Error(code="internal", message="the engine failed; its log says why")


MAX_ANSWERS = 16_384  # lasts for minutes, even if one client sends changes without pause
MAX_WAITING = 64  # senders of one repeated command that has no answer yet


@dataclass(slots=True)
class _KeptAnswer:
    digest: bytes  # of the command, kept in its place
    reply: AnyReply | None = None
    waiting: list[tuple[bytes, bytes]] = field(default_factory=list)  # identity, command id


class Changes:
    """Passes commands that change the engine on to its thread. Use it on the control thread.

    A client that lost its connection before the answer arrived sends the command again. It is still
    applied only once: the answer to each change is kept, and the sender of a repeated command gets
    it, as soon as there is one.
    """

    def __init__(
        self, inbox: Inbox, connections: Connections, send: Callable[[bytes, bytes, AnyReply], None]
    ) -> None:
        self._inbox = inbox
        self._connections = connections
        self._send = send
        # By client and the command's name; the oldest are dropped.
        self._answers: OrderedDict[tuple[bytes, bytes], _KeptAnswer] = OrderedDict()

    def apply(self, client: RemoteClient, command: Change, payload: bytes) -> None:
        """Handle a change. Raises ConfigError if its name belongs to another command."""
        # A name is valid for all connections of a key. Without keys, all clients are one user.
        # A command without a name is identified by its connection, id and content.
        identity, command_id = client.identity, client.command_id
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        once = identity, command_id + digest
        if command.once:
            once = self._connections.key(identity), command.once.encode()
        kept = self._answers.get(once)
        if kept is None:
            self._answers[once] = _KeptAnswer(digest)
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
            client.once = once
            asker = self._connections.asker(identity, command.who)
            self._inbox.put(Call(command, client, asker=asker, lane=client.account))
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
