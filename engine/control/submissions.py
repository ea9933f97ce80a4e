"""What clients want of the engine, on its way into the inbox: `Submissions` and `Changes`.

Short prompts are tokenised at once. Long ones take up to seconds, so two other threads tokenise
them: the control thread has to send all replies meanwhile.
"""

import hashlib
import logging
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from stepscope.engine.control.intake import Intake, num_chars
from stepscope.engine.control.remote_client import Outgoing, RemoteClient
from stepscope.engine.loop.inbox import Call, Inbox, Refusal
from stepscope.engine.protocol.commands import Change, Submit
from stepscope.engine.protocol.replies import AnyReply, Error
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.connections import Connections

log = logging.getLogger("stepscope.engine")

LONG_TEXT = 16_384  # characters; tokenising this many takes some 10 ms
MAX_WAITING_BYTES = 64 * 1024 * 1024  # of all long prompts that wait or are being tokenised
NUM_THREADS = 2  # that tokenise long prompts
_TURN_CHARS = 64  # a turn of a conversation counts as its text and this many characters


@dataclass(slots=True)
class LongPrompt:
    """A prompt that waits to be tokenised; without its command, nobody wants it any more."""

    command: Submit | None
    client: RemoteClient
    num_bytes: int

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.client.identity, self.client.command_id


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
        self._long: queue.SimpleQueue[LongPrompt | None] = queue.SimpleQueue()
        self._held: dict[tuple[bytes, bytes], LongPrompt] = {}  # those that are wanted
        self._lock = threading.Lock()  # of `_held`
        for _ in range(NUM_THREADS):
            threading.Thread(target=self._work, name="tokenising", daemon=True).start()

    def close(self) -> None:
        """Drop all prompts that wait to be tokenised, and end the threads."""
        with self._lock:
            self._drop(list(self._held))
        for _ in range(NUM_THREADS):
            self._long.put(None)

    def accept(self, command: Submit, client: RemoteClient) -> None:
        """Accept a prompt. Raises ConfigError if it is invalid, or too many bytes wait already."""
        size = num_chars(command) + _TURN_CHARS * len(command.messages or ())
        if size <= LONG_TEXT:
            self._charge_text(client.account, size)
            self._inbox.put(self._prepared(command, client))
            return
        texts = (text for each in command.messages or () for text in each.texts)
        num_bytes = sum(map(sys.getsizeof, (command.prompt or "", *texts)))
        prompt = LongPrompt(command, client, num_bytes)
        with self._lock:
            num_waiting = sum(each.num_bytes for each in self._held.values())
            if num_waiting + num_bytes > MAX_WAITING_BYTES:
                raise ConfigError(
                    "queue_full",
                    f"{MAX_WAITING_BYTES // 2**20} MB of long prompts already wait to be "
                    "tokenised; try again later",
                )
            self._held[prompt.key] = prompt
        self._long.put(prompt)

    def forget(self, identity: bytes) -> None:
        """Drop the waiting prompts of a client that is gone."""
        with self._lock:
            self._drop([key for key in self._held if key[0] == identity])

    def _drop(self, keys: list[tuple[bytes, bytes]]) -> None:
        """Drop prompts; what comes of one that is being tokenised is thrown away at its end."""
        for key in keys:
            self._held.pop(key).command = None  # frees its text now

    def _prepared(self, command: Submit, client: RemoteClient) -> Call:
        try:
            token_ids = self._intake.prepare(command)
        except ConfigError as error:
            self._inbox.put(Refusal(command.client_id, str(error), lane=client.account))
            raise
        command = self._intake.fitted(command, len(token_ids))
        stop_text = self._intake.stop_text(command.sampling)
        prompt_text = self._intake.prompt_text(token_ids)
        call = Call(command, client, token_ids, stop_text, prompt_text, lane=client.account)
        call.arrival_ns = self._clock()
        return call

    def _work(self) -> None:
        while (prompt := self._long.get()) is not None:
            if prompt.command is not None:
                made = self._prepared_long(prompt.command, prompt.client)
                with self._lock:
                    if self._held.pop(prompt.key, None) is None:
                        continue
                    if isinstance(made, Call):
                        self._inbox.put(made)
                    else:
                        prompt.client.reply(made)
                del made  # free the memory now, not with the next prompt
            del prompt

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
