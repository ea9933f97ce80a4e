"""`Streams`: runs requests through an engine's loop and records when each token came.

Some of the requests arrive later, when the first ones have produced a given number of tokens.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.engine.bench.gpu.measure.bench import NotMeasuredError
from stepscope.engine.control.intake import Intake
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.protocol.commands import ResetPrefixCache, SetKnobs, Submit
from stepscope.engine.protocol.replies import AnyReply, Error, Output, Submitted
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.scheduling.request import Request

WHO = "bench"


class StreamArrival(NamedTuple):
    """A request that arrives once the requests submitted at the start have `after_tokens` outputs.

    The tokens of all these requests count together.
    """

    after_tokens: int
    submit: Submit


class Stream:
    """The client of one request. Keeps the tokens it receives and their times."""

    def __init__(self, run: "Streams", *, is_first: bool) -> None:
        self._run = run
        self.is_first = is_first  # submitted at the start
        self.request: Request | None = None
        self.sent_ns = 0
        self.token_ids: list[int] = []
        self.times_ns: list[int] = []  # the time of each token

    def reply(self, message: AnyReply) -> None:
        if isinstance(message, Submitted):
            self.request = self._run.core.scheduler.requests[message.request_id]
        elif isinstance(message, Output):
            if message.token_ids and self.request is not None:
                now_ns = self.request.last_token_ns or 0
                self.token_ids += message.token_ids
                self.times_ns += [now_ns] * len(message.token_ids)
                self._run.on_tokens(self, len(message.token_ids), now_ns)
            if message.finish_reason is not None:
                self._run.on_end()
        elif isinstance(message, Error):
            self._run.fail(message.message)


class Streams:
    """One run of some requests. Times are on the engine's clock, in nanoseconds.

    Args:
        first: requests submitted at the start, right after the prefix cache was emptied.
        arrivals: later requests, in order of `after_tokens`.
        most_s: seconds after which the run ends, even if requests are still running.
        before: called on its own thread. The first requests are submitted when it has returned.
    """

    def __init__(
        self,
        core: EngineCore,
        intake: Intake,
        first: Sequence[Submit],
        arrivals: Sequence[StreamArrival] = (),
        *,
        most_s: float,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.core = core
        self.is_partial = False
        self.start_ns = self.end_ns = 0
        self._most_ns = int(most_s * 1e9)
        self._before = before
        self._calls = [(submit, intake.prepare(submit)) for submit in first]
        self._waiting = [
            (each.after_tokens, each.submit, intake.prepare(each.submit)) for each in arrivals
        ]
        self.streams = [Stream(self, is_first=True) for _ in first]
        self.late: list[Stream] = []
        self._num_open = len(first) + len(arrivals)
        self._num_tokens = 0  # of the first requests
        self._failure: str | None = None

    def run(self) -> None:
        """Run all requests.

        Raises:
            NotMeasuredError: the engine refused a request, or `before` failed.
        """
        core = self.core
        thread = threading.Thread(target=self._begin, daemon=True)
        if self._before is None:
            self._submit()
        else:
            thread.start()
        core.run()
        if self._before is not None:
            thread.join()
        if self._failure is not None:
            raise NotMeasuredError(self._failure)

    def _begin(self) -> None:
        assert self._before is not None
        try:
            self._before()
        except NotMeasuredError as error:
            self.fail(str(error))
        else:
            self._submit()

    def _submit(self) -> None:
        self.core.inbox.put(Call(ResetPrefixCache(who=WHO), SilentClient()))
        self.start_ns = self.end_ns = self.core.runner.clock()
        for (submit, token_ids), stream in zip(self._calls, self.streams, strict=True):
            stream.sent_ns = self.start_ns
            self.core.inbox.put(Call(submit, stream, token_ids))

    def on_tokens(self, stream: Stream, count: int, now_ns: int) -> None:
        self.end_ns = now_ns
        if stream.is_first:
            self._num_tokens += count
        while self._waiting and self._num_tokens >= self._waiting[0][0]:
            _, submit, token_ids = self._waiting.pop(0)
            late = Stream(self, is_first=False)
            late.sent_ns = now_ns
            self.late.append(late)
            self.core.inbox.put(Call(submit, late, token_ids))
        if now_ns - self.start_ns > self._most_ns and not self.core.stopping:
            self.is_partial = True
            self.core.stop()

    def on_end(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self.core.stop()

    def fail(self, message: str) -> None:
        self._failure = message
        self.core.stop()

    @property
    def seconds(self) -> float:
        """Seconds from the submit of the first requests to the last token of any request."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def num_output_tokens(self) -> int:
        return sum(len(each.times_ns) for each in (*self.streams, *self.late))


def gaps_ms(streams: Sequence[Stream], from_ns: int = 0) -> list[float]:
    """Return the gaps between successive tokens of each stream, in milliseconds.

    Args:
        from_ns: only gaps whose second token came after this time.
    """
    return [
        (later - earlier) / 1e6
        for stream in streams
        for earlier, later in zip(stream.times_ns, stream.times_ns[1:], strict=False)
        if later > from_ns
    ]


def set_knobs(core: EngineCore, **changes: KnobValue) -> None:
    """Set knobs between two runs. The values apply before the first request of the next run.

    Raises:
        ConfigError: the engine refuses the change.
    """
    core.scheduler.knobs.changed(changes, core.limits)
    core.inbox.put(Call(SetKnobs(changes=changes, who=WHO), SilentClient()))
