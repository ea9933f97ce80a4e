"""`Director`: carries out what the tour does to the engine, on a thread of its own.

An act is one such thing: set the workload, set the token budget, or send a prompt.
"""

import queue
import threading
import time

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import CommandRefused, EngineUnreachable
from stepscope.engine.protocol.commands import SetWorkload, Submit
from stepscope.engine.protocol.replies import Output, Submitted
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.tui.session.tour.chapters import Act, SendPrompt

_ANSWER_S = 120.0  # at most, to wait for the last token of a prompt
_JOIN_S = 1.0  # to wait for the first requests of a workload
_IDLE_S = 30.0


class Director:
    """Carries out lists of acts; a new list ends the one before."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lists: queue.SimpleQueue[tuple[Act, ...] | None] = queue.SimpleQueue()
        self._errors: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended: int | None = None
        self._thread = threading.Thread(target=self._run, name="tour", daemon=True)

    def __enter__(self) -> "Director":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lists.put(None)
        self._thread.join()

    def do(self, acts: tuple[Act, ...]) -> None:
        self._ended = None
        self._lists.put(acts)

    @property
    def ended(self) -> int | None:
        """Id of the request that an act waited for last, once all acts are done."""
        return self._ended

    def news(self) -> str | None:
        """Return why an act failed; None if none has failed since the last call."""
        return None if self._errors.empty() else self._errors.get()

    def _run(self) -> None:
        with ControlClient(self._endpoint) as client:  # closing it ends its requests
            while True:
                try:
                    acts = self._lists.get(timeout=_IDLE_S)
                except queue.Empty:
                    client.idle()
                    continue
                if acts is None:
                    return
                try:
                    self._do(client, acts)
                except (CommandRefused, EngineUnreachable) as error:
                    self._errors.put(f"the tour could not go on: {error}")

    def _do(self, client: ControlClient, acts: tuple[Act, ...]) -> None:
        ended: int | None = None
        for act in acts:
            if not self._lists.empty():
                return
            if isinstance(act, SendPrompt):
                ended = self._send(client, act)
                continue
            client.ask(act)
            if isinstance(act, SetWorkload):
                self._rest(_JOIN_S)
        self._ended = ended

    def _rest(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while self._lists.empty() and time.monotonic() < end_s:
            time.sleep(0.05)

    def _send(self, client: ControlClient, prompt: SendPrompt) -> int | None:
        """Send a prompt; return its request's id if the act waits for its end, and it has ended."""
        token_ids = [
            (prompt.seed * 7919 + n * n * 31 + n) % 199 + 1 for n in range(prompt.num_tokens)
        ]
        sampling = SamplingParams(max_tokens=prompt.max_tokens, ignore_eos=True)
        submitted = client.ask(
            Submit(
                client_id=prompt.name, prompt_token_ids=token_ids, sampling=sampling, stream=False
            )
        )
        assert isinstance(submitted, Submitted)
        deadline_s = time.monotonic() + _ANSWER_S
        while prompt.waits and self._lists.empty() and time.monotonic() < deadline_s:
            received = client.receive(0.1)
            reply = None if received is None else received[1]
            if isinstance(reply, Output) and reply.request_id == submitted.request_id:
                return submitted.request_id
        return None
