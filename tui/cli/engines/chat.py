"""`stepscope chat`: a conversation in the terminal; each answer ends with its latencies.

An answer is a request like any other. The engine's telemetry tells when its tokens came, and why
the slowest token was late.
"""

import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from stepscope.engine.client.client import CommandRefused, ControlClient
from stepscope.engine.models import smollm2
from stepscope.engine.protocol.commands import Abort, ChatMessage, Submit
from stepscope.engine.protocol.replies import Error, Output, Submitted
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.engine_process import EngineProcess
from stepscope.tui.cli.shared.options import EngineName, command, option
from stepscope.tui.cli.shared.output import Progress, ms, say
from stepscope.tui.cli.shared.process import StopSignals, awaited, running
from stepscope.tui.session.who import who
from stepscope.tui.settings.cli_errors import CommandFailed
from stepscope.tui.views import late_text

MODEL = "smollm2"  # the model of an engine that is started for the chat
_LOOK_S = 0.1
_TELEMETRY_S = 3.0  # how long the records of an answer may take to arrive
_CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")


@command("stepscope chat", "stepscope chat engine-0 --temperature 0", takes_key=True)
def chat(
    endpoint: EngineName = None,
    model: str | None = option(
        "TEXT", "start an engine with this model (default: talk to one that runs, else smollm2)"
    ),
    temperature: float = option("NUMBER", "0 is greedy", default=0.7),
    max_tokens: int = option("INT", "tokens of an answer", default=512),
) -> None:
    """Talk to a model, and see what its tokens waited for.

    Each answer ends with its TTFT, its ITL and the causes of its slowest token. Ctrl-C stops an
    answer, Ctrl-D leaves.
    """
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    with _engine(endpoint, model) as chosen:
        source = Subscriber(chosen, History())
        with running(source):
            with connect(chosen) as client:
                name = client.info().model
            # So that no step of the first answer is missed.
            awaited(lambda: source.status == "live", _TELEMETRY_S)
            if name == smollm2.NAME:
                say(smollm2.NOTICE)
            say(f"{name} on {chosen.name}: Ctrl-C stops an answer, Ctrl-D leaves")
            _Conversation(chosen, source, sampling).run()


@contextmanager
def _engine(endpoint: str | None, model: str | None) -> Iterator[Endpoint]:
    if model is None and (endpoint is not None or find_local()):
        yield choose(endpoint, "stepscope chat {}")
        return
    options = {"model": model or MODEL, "http": ""}
    with Progress() as progress, EngineProcess(options, progress) as engine:
        progress.close()
        yield engine.endpoint


class _Conversation:
    """The messages so far. Sends each new message to the engine and prints the answer."""

    def __init__(self, endpoint: Endpoint, source: Subscriber, sampling: SamplingParams) -> None:
        self._endpoint = endpoint
        self._source = source
        self._sampling = sampling
        self._messages: list[ChatMessage] = []

    def run(self) -> None:
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                text = input(prompt).strip()
            except KeyboardInterrupt:
                say("")
                continue
            except EOFError:
                if prompt:
                    say("")
                return
            if text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        self._messages.append(ChatMessage(role="user", content=text))
        stop = StopSignals(signal.SIGINT)
        try:
            with connect(self._endpoint) as client, stop:
                request_id, answer = self._answer(client, stop)
        except CommandRefused as error:
            self._messages.pop()
            say(f"refused: {error}")
            return
        self._messages.append(ChatMessage(role="assistant", content=answer))
        say("", f"[{self._figures(request_id)}]", "")

    def _answer(self, client: ControlClient, stop: StopSignals) -> tuple[int, str]:
        submit = Submit(client_id="chat", messages=self._messages, sampling=self._sampling,
                        fit_max_tokens=True)  # fmt: skip
        asked = client.send(submit)
        request_id: int | None = None
        text, has_stopped = "", False
        while True:
            number, reply = client.receive(_LOOK_S) or (None, None)
            if stop and request_id is not None and not has_stopped:
                has_stopped = True
                client.send(Abort(request_id=request_id, who=who()))
            if self._source.status == "down":
                raise CommandFailed(f"the engine is gone: {self._source.error}")
            if number != asked:
                continue
            if isinstance(reply, Error):
                raise CommandRefused(reply.code, reply.message)
            if isinstance(reply, Submitted):
                request_id = reply.request_id
            if isinstance(reply, Output):
                piece = reply.text or ""
                text += piece
                # The model may write control sequences, which would act on the terminal.
                print(_CONTROL.sub("?", piece), end="", flush=True)
                if reply.finish_reason is not None:
                    return reply.request_id, text

    def _figures(self, request_id: int) -> str:
        history = self._source.history

        def has_ended() -> bool:
            view = history.state.requests.get(request_id)
            return view is not None and view.finish_reason is not None

        if not awaited(has_ended, _TELEMETRY_S):
            return "TTFT and ITL are unknown: its records did not come"
        view = history.state.requests[request_id]
        life = history.lives.life(view)
        if life is None or not life.waits:
            return "no token came"
        columns = shutil.get_terminal_size().columns
        elsewhere = "" if view.handed_to is None else f"; {view.handed_to} made the further tokens"
        room = columns - 2 if sys.stdout.isatty() else 200
        first, *later = life.waits
        text = f"TTFT {ms(first.gap_ns)}" if first.token_idx == 0 else "TTFT unknown"
        slowest = max(later, key=lambda late: late.gap_ns, default=first)
        if later:
            text += f"  ITL {ms(median(late.gap_ns for late in later))}"
            text += f"  slowest token {slowest.token_idx + 1} after {ms(slowest.gap_ns)}"
        room -= len(text) + len(elsewhere) + 2
        return f"{text}: {late_text.of_wait(slowest, room)}{elsewhere}"
