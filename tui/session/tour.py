"""`Tour`: where the person is in the guided tour, and what it shows; `Director`: what it does."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.engine.client.client import CommandRefused, ControlClient, EngineUnreachable
from stepscope.engine.protocol.commands import SetWorkload, Submit
from stepscope.engine.protocol.replies import Output, Submitted
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.history.history import History
from stepscope.tui.session.chapters import CHAPTERS, Act, Chapter, SendPrompt, TimedAct
from stepscope.tui.views.view import View

_ANSWER_S = 120.0  # at most, to wait for an answer, or for the last token of a prompt
_JOIN_S = 1.0  # to wait for the first requests of a workload
_IDLE_S = 30.0


class Director:
    """Carries out lists of acts on a thread; a new list ends the one before.

    `goes_on`: called before each act; once it returns False, the rest of the list is left out.
    """

    def __init__(self, endpoint: Endpoint, goes_on: Callable[[], bool] = lambda: True) -> None:
        self._endpoint = endpoint
        self._goes_on = goes_on
        self._lists: queue.SimpleQueue[Sequence[Act] | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended: int | None = None
        self._thread = threading.Thread(target=self._run, name="tour", daemon=True)

    def __enter__(self) -> "Director":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lists.put(None)
        self._thread.join()

    def do(self, acts: Sequence[Act]) -> None:
        self._ended = None
        self._lists.put(acts)

    def ended(self) -> int | None:
        """Id of the request that an act waited for last, once all acts are done."""
        return self._ended

    def news(self) -> str | None:
        """Return a hint, or why an act failed; None if there is none since the last call."""
        return None if self._news.empty() else self._news.get()

    def _run(self) -> None:
        with ControlClient(self._endpoint, _ANSWER_S) as client:  # closing it ends its requests
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
                    self._news.put(f"what was planned could not go on: {error}")

    def _do(self, client: ControlClient, acts: Sequence[Act]) -> None:
        ended, start_s = None, time.monotonic()
        for act in acts:
            if isinstance(act, TimedAct):
                self._rest(start_s + act.at_s)
            if not self._lists.empty() or not self._goes_on():
                return
            if isinstance(act, SendPrompt):
                ended = self._send(client, act)
            elif isinstance(act, TimedAct):
                if act.hint:
                    self._news.put(act.hint)
                if act.command is not None:
                    client.ask(act.command)
            else:
                client.ask(act)
                if isinstance(act, SetWorkload):
                    self._rest(time.monotonic() + _JOIN_S)
        self._ended = ended

    def _rest(self, until_s: float) -> None:
        while self._lists.empty() and time.monotonic() < until_s:
            time.sleep(0.05)

    def _send(self, client: ControlClient, prompt: SendPrompt) -> int | None:
        """Send a prompt; return its request's id if the act waits for its end, and it has ended."""
        numbers = range(prompt.num_tokens)
        token_ids = [(prompt.seed * 7919 + n * n * 31 + n) % 199 + 1 for n in numbers]
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


_PARTS = ("before", "question", "answer")
_END = (
    "That was the tour. {quit} leaves, {tour_again} goes back. Next: 'stepscope demo' runs freely, "
    "'stepscope top' shows your own engine, 'stepscope lab' measures what you saw."
)


class TourPage(NamedTuple):
    number: int  # of the chapter, from 1; `total` + 1 after the last
    total: int
    title: str
    part: str
    text: str
    panels: Sequence[str]
    is_held: bool  # the tour has stopped the picture


class Tour:
    """The position in the chapters; `first`: the one to begin with, from 0.

    `do`, `ended`: as of `Director`.
    """

    def __init__(
        self, do: Callable[[tuple[Act, ...]], None], ended: Callable[[], int | None], first: int = 0
    ) -> None:
        self._do = do
        self._ended = ended
        self._number = first
        self._part = 0
        self.held_step: int | None = None  # the step where the tour stopped the picture

    @property
    def chapter(self) -> Chapter | None:
        """The current chapter; None after the last."""
        return CHAPTERS[self._number] if self._number < len(CHAPTERS) else None

    @property
    def page(self) -> TourPage:
        chapter, total = self.chapter, len(CHAPTERS)
        if chapter is None:
            return TourPage(total + 1, total, "The end", "", _END, (), is_held=False)
        part = _PARTS[self._part]
        panels = chapter.panels if part == "question" else ()
        text = getattr(chapter, part)
        is_held = self.held_step is not None
        return TourPage(self._number + 1, total, chapter.title, part, text, panels, is_held)

    def go_on(self) -> None:
        """Go to the next part. At the question, start the acts of the chapter."""
        chapter = self.chapter
        if chapter is None:
            return
        self._part += 1
        if self._part == 1:
            self.held_step = None
            self._do(chapter.acts)
        elif self._part == len(_PARTS):
            self._begin(self._number + 1)

    def again(self) -> None:
        """Go to the beginning of this chapter; if already there, to the chapter before it."""
        self._begin(self._number if self._part else max(0, self._number - 1))

    def look(self, view: View, history: History) -> None:
        """Before a picture: stop it where the last prompt ended, if the chapter wants that."""
        chapter = self.chapter
        if chapter is None or not chapter.is_held or _PARTS[self._part] != "question":
            return
        request_id, last = self._ended(), history.last_step
        if self.held_step is not None or request_id is None or last is None:
            return
        if (end := history.end_of(request_id, last)) is not None:
            # One step earlier, the request still has its KV blocks.
            self.held_step = view.cursor = view.right = max(history.first_step or 0, end.step - 1)
            view.selected = request_id

    def _begin(self, number: int) -> None:
        self._number, self._part, self.held_step = number, 0, None
