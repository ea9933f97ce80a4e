"""`EngineLink`: sends commands to an engine from its own thread, so that the screen never waits."""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from stepscope.engine.client.client import (
    CommandRefused,
    ControlClient,
    EngineUnreachable,
    NoAnswer,
)
from stepscope.engine.client.group import set_on_all
from stepscope.engine.protocol.commands import Command, SetKnobs
from stepscope.engine.protocol.replies import AnyReply
from stepscope.engine.protocol.wire import KnobSpec, KnobValue
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.tui.settings.terminal import see_log


class KnobsNow(NamedTuple):
    engine_id: str
    version: int
    values: Mapping[str, KnobValue]
    specs: tuple[KnobSpec, ...]


class KnobChange(NamedTuple):
    """A new value for a knob; refused at another `version` of the knobs, and by another engine."""

    name: str
    value: KnobValue
    version: int
    engine_id: str = ""


log = logging.getLogger("stepscope.tui")

_IDLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a command: a reply, or one line on why there is none."""

    what: str  # the command in the words that the operator has seen
    command: Command
    reply: AnyReply | None = None
    error: str | None = None
    may_follow: bool = False  # no answer in time: the engine may still carry it out


class EngineLink:
    """A queue of commands to one engine, sent one at a time and answered in order.

    The first command starts the thread, which makes its client by `connect`. `ask`, `answers` and
    `pending` belong to the UI thread. `siblings` returns the addresses of the engine's other
    data-parallel ranks; it is called for each knob change.
    """

    def __init__(
        self,
        connect: Callable[[], ControlClient],
        siblings: Callable[[], Sequence[Endpoint]] = tuple,
    ) -> None:
        self._connect = connect
        self._siblings = siblings
        self._commands: queue.SimpleQueue[tuple[str, Command] | None] = queue.SimpleQueue()
        self._answers: deque[Answer] = deque()
        self._asked: deque[str] = deque()
        self._thread: threading.Thread | None = None

    def ask(self, what: str, command: Command) -> None:
        """Queue a command; `what`: in words for the operator."""
        self._asked.append(what)
        self._commands.put((what, command))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine link", daemon=True)
            self._thread.start()

    @property
    def pending(self) -> str:
        """The commands without an answer yet, in words."""
        return ", ".join(self._asked)

    def answers(self) -> list[Answer]:
        found = []
        while self._answers:
            found.append(self._answers.popleft())
            self._asked.popleft()
        return found

    def close(self) -> None:
        """Ask the thread to end once it has sent all queued commands; do not wait for that."""
        self._commands.put(None)

    def _ask_all(self, client: ControlClient, command: Command) -> AnyReply:
        """Send a command; a change of knobs goes to all data-parallel ranks or to none of them."""
        if not isinstance(command, SetKnobs) or not (siblings := self._siblings()):
            return client.ask(command)
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(ControlClient(each)) for each in siblings]
            changes, version = command.changes, command.expected_version
            _, (ack, *acks) = set_on_all([client, *others], changes, command.who, version)
        steps = (
            f"{each.endpoint.name} from step {other.effective_step:,}"
            for each, other in zip(others, acks, strict=True)
        )
        return msgspec.structs.replace(ack, detail=", ".join(steps))

    def _run(self) -> None:
        client: ControlClient | None = None
        try:
            while True:
                try:
                    job = self._commands.get(timeout=_IDLE_S)
                except queue.Empty:
                    if client is not None:
                        client.idle()
                    continue
                if job is None:
                    return
                found = partial(Answer, *job)
                try:
                    if client is None:
                        client = self._connect()
                    answer = found(self._ask_all(client, job[1]))
                except CommandRefused as error:
                    answer = found(error=str(error))
                except EngineUnreachable as error:
                    answer = found(error=str(error), may_follow=isinstance(error, NoAnswer))
                    if client is not None:
                        # A command that was not delivered must not reach an engine that starts
                        # later.
                        client.close()
                        client = None
                except Exception as failure:
                    log.exception("asking the engine failed")
                    answer = found(error=f"internal error, {see_log(failure)}")
                self._answers.append(answer)
        finally:
            if client is not None:
                client.close()
