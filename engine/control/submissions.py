"""`Submissions`: checks and tokenises prompts, and puts them into the engine's inbox.

Short prompts are tokenised at once. Long prompts take up to seconds, so other threads tokenise
them, because the control thread has to send all replies meanwhile (`LongPrompts`). One thread
handles only the longest, so that the other long prompts do not wait for them. In the queue of each
thread, shorter prompts go first, but no prompt waits forever (`MAX_OVERTAKEN_S`).
"""

import heapq
import itertools
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from stepscope.engine.control.intake import Intake, num_chars
from stepscope.engine.control.remote_client import RemoteClient
from stepscope.engine.loop.inbox import Call, Inbox, Refusal
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Error
from stepscope.engine.protocol.settings.knobs import ConfigError

LONGEST_TEXTS = 256 * 1024  # characters from which the thread for the longest is used: some 0.2 s
MAX_QUEUED_BYTES = 64 * 1024 * 1024  # of all prompts that wait or are being tokenised
MAX_CLIENT_BYTES = MAX_QUEUED_BYTES // 2  # of one client
# A prompt overtakes one that arrived up to this long earlier, per character by which it is shorter.
# That is a hundred times the time to tokenise a character. A prompt that is `MAX_OVERTAKEN_S` old
# is not overtaken any more.
OVERTAKES_S = 100e-6
MAX_OVERTAKEN_S = 30.0


def text_bytes(command: Submit) -> int:
    """Return the memory of a prompt's text in bytes."""
    texts = (text for each in command.messages or () for text in each.texts)
    return sum(map(sys.getsizeof, (command.prompt or "", *texts)))


@dataclass(slots=True)
class LongPrompt:
    command: Submit
    client: RemoteClient
    num_bytes: int
    is_wanted: bool = True


class LongPrompts:
    """Two queues of prompts, each with a thread that tokenises.

    Any thread may call `add`, `withdraw` and `forget`.

    `prepare`: tokenises a prompt on one of the two threads, and returns a function that delivers
    the result. That function is called only if the client still waits. It must not block.
    """

    def __init__(self, prepare: Callable[[Submit, RemoteClient], Callable[[], None]]) -> None:
        self._prepare = prepare
        self._change = threading.Condition()
        self._numbers = itertools.count()
        self._queues: tuple[list[tuple[float, int, LongPrompt]], ...] = ([], [])
        self._held: dict[tuple[bytes, bytes], LongPrompt] = {}  # queued or being tokenised
        self._num_bytes: Counter[bytes] = Counter()  # by client
        self._is_closed = False
        for queue in self._queues:
            threading.Thread(
                target=self._work, args=(queue,), name="tokenising", daemon=True
            ).start()

    def close(self) -> None:
        """Drop all waiting prompts and end the threads."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    def add(self, command: Submit, client: RemoteClient, num_chars: int) -> None:
        """Queue a prompt. Raises ConfigError if too many bytes of prompts wait already."""
        num_bytes = text_bytes(command)
        prompt = LongPrompt(command, client, num_bytes)
        due_s = time.monotonic() + min(MAX_OVERTAKEN_S, num_chars * OVERTAKES_S)
        with self._change:
            if self._num_bytes.total() + num_bytes > MAX_QUEUED_BYTES:
                raise _full(MAX_QUEUED_BYTES, "long prompts")
            if self._num_bytes[client.identity] + num_bytes > MAX_CLIENT_BYTES:
                raise _full(MAX_CLIENT_BYTES, "your long prompts")
            self._num_bytes[client.identity] += num_bytes
            self._held[_key(client)] = prompt
            queue = self._queues[num_chars >= LONGEST_TEXTS]
            heapq.heappush(queue, (due_s, next(self._numbers), prompt))
            self._change.notify_all()

    def withdraw(self, identity: bytes, command_id: bytes) -> RemoteClient | None:
        """Drop a prompt that its client cancelled, and return the client."""
        with self._change:
            prompt = self._held.get((identity, command_id))
            if prompt is None or not prompt.is_wanted:
                return None
            self._drop(prompt)
            return prompt.client

    def forget(self, identity: bytes) -> None:
        """Drop the prompts of a client that is gone."""
        with self._change:
            for prompt in list(self._held.values()):
                if prompt.client.identity == identity:
                    self._drop(prompt)

    def _drop(self, prompt: LongPrompt) -> None:
        """Drop a prompt that waits; one that is being tokenised is thrown away at its end."""
        prompt.is_wanted = False
        for queue in self._queues:
            kept = [entry for entry in queue if entry[2] is not prompt]
            if len(kept) < len(queue):
                queue[:] = kept
                heapq.heapify(queue)
                self._release(prompt)

    def _release(self, prompt: LongPrompt) -> None:
        prompt.is_wanted = False
        identity = prompt.client.identity
        self._num_bytes[identity] -= prompt.num_bytes
        if not self._num_bytes[identity]:
            del self._num_bytes[identity]
        if self._held.get(_key(prompt.client)) is prompt:
            del self._held[_key(prompt.client)]

    def _work(self, queue: list[tuple[float, int, LongPrompt]]) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: queue or self._is_closed)
                if self._is_closed:
                    return
                _, _, prompt = heapq.heappop(queue)
            hand_on = self._prepare(prompt.command, prompt.client)
            with self._change:
                if prompt.is_wanted:
                    hand_on()
                self._release(prompt)
            del prompt, hand_on  # free the memory now, not with the next prompt


def _key(client: RemoteClient) -> tuple[bytes, bytes]:
    return client.identity, client.command_id


def _full(num_bytes: int, whose: str) -> ConfigError:
    return ConfigError(
        "queue_full",
        f"{num_bytes // 2**20} MB of {whose} already wait to be tokenised; try again later",
    )


log = logging.getLogger("stepscope.engine")

LONG_TEXT = 16_384  # characters; tokenising this many takes some 10 ms
_TURN_CHARS = 64  # a turn of a conversation counts as its text and this many characters


class Submissions:
    """Accepts prompts (`Submit` commands) of all clients.

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
        self._long = LongPrompts(self._prepare_long)

    def close(self) -> None:
        """Drop all prompts that wait to be tokenised, and end the threads."""
        self._long.close()

    def accept(self, command: Submit, client: RemoteClient) -> None:
        """Accept a prompt. Raises ConfigError if it is invalid, or too many bytes wait already."""
        size = num_chars(command) + _TURN_CHARS * len(command.messages or ())
        if size <= LONG_TEXT:
            self._charge_text(client.account, size)
            self._inbox.put(self._prepared(command, client))
        else:
            self._long.add(command, client, size)

    def withdraw(self, identity: bytes, command_id: bytes) -> bool:
        """Cancel a prompt that waits to be tokenised. Returns False if no such prompt waits."""
        client = self._long.withdraw(identity, command_id)
        if client is None:
            return False
        client.reply(Error(code="withdrawn", message="the prompt was withdrawn by its client"))
        return True

    def forget(self, identity: bytes) -> None:
        """Drop the waiting prompts of a client that is gone."""
        self._long.forget(identity)

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

    def _prepare_long(self, command: Submit, client: RemoteClient) -> Callable[[], None]:
        try:
            call = self._prepared(command, client)
        except ConfigError as error:
            answer = Error(code=error.code, message=str(error))
        except Exception:
            log.exception("a long prompt could not be tokenised")
            answer = Error(code="internal", message="the engine failed; its log says why")
        else:
            return lambda: self._inbox.put(call)
        return lambda: client.reply(answer)
