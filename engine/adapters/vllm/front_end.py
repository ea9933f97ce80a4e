"""Watches requests in vLLM's API server, on its event loop, and tells the engine's process of them.

vLLM has a queue for each request. Its output processor puts tokens there as they come from the
engine. The request's HTTP task takes them, writes them to the client, and only then looks into the
queue again.
"""

import asyncio
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from time import monotonic_ns
from typing import Any

from stepscope.engine.adapters.attached.description import rank_endpoint
from stepscope.engine.adapters.attached.hooks import Hooks
from stepscope.engine.adapters.attached.reports import FrontReport, ReportSender, keep
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.protocol.wire import FrontEnd, TakenRow
from stepscope.engine.transport.endpoints import reports_path

log = logging.getLogger("vllm.stepscope")

_FLUSH_S = 0.05
_MOST_CHUNKS = 2_000  # in one report, which must fit into a datagram
_STREAM = "_stepscope"
_http_ns: ContextVar[int | None] = ContextVar("stepscope_http_ns", default=None)


def hook(endpoint: str, after: Callable[..., None]) -> None:
    """Watch each `AsyncLLM` that vLLM will build in this process, by the plugin's `after`."""
    from vllm.v1.engine.async_llm import AsyncLLM

    after(AsyncLLM, "__init__", lambda llm, _: _watch(llm, endpoint))


def _watch(llm: Any, endpoint: str) -> None:
    from vllm.v1.engine.output_processor import RequestOutputCollector

    size = llm.vllm_config.parallel_config.data_parallel_size
    ranks = {versions.data_parallel_rank(llm), *range(size)}
    # Where each rank is an engine of its own, the first believes that it is the only one.
    of = [rank_endpoint(endpoint, 0, 1), *(rank_endpoint(endpoint, n, size) for n in sorted(ranks))]
    paths = list(dict.fromkeys(map(reports_path, of)))
    watched = FrontEndWatch(getattr(llm.engine_core, "client_index", 0), paths)
    watched.hook(llm.output_processor)
    _hook_queues(RequestOutputCollector)
    if (applications := sys.modules.get("starlette.applications")) is not None:
        _hook_http(applications.Starlette)


class Stream:
    """A request, or `n` requests with one prompt, until the answer has gone out.

    `numbers`: of the requests, by the index of their choice; `came`: when the tokens came that are
    in the queue, by number; `going`: the same of tokens that HTTP has taken.
    """

    __slots__ = ("came", "going", "numbers", "watch")

    def __init__(self, watch: "FrontEndWatch") -> None:
        self.watch = watch
        self.numbers: list[int] = []
        self.came: dict[int, int] = {}
        self.going: dict[int, int] = {}

    def put(self, output: Any) -> None:
        # Out of a batch it is an abort; a batch of 0.33 has errors, too (a paused vLLM refuses).
        if (now_ns := self.watch.batch_ns) and not isinstance(output, Exception):
            numbers = self.numbers
            if len(numbers) > 1:
                numbers = [numbers[each.index] for each in output.outputs]
            for number in numbers:
                self.came.setdefault(number, now_ns)

    def taken(self, output: Any) -> None:
        if output is not None:
            self.going, self.came = self.came, {}

    def sent(self) -> None:
        if self.going:
            going, self.going = self.going, {}
            self.watch.note_chunks(going, monotonic_ns())


class FrontEndWatch:
    """Follows the requests of one API server. The first error of ours ends it for good.

    `paths`: sockets of engines; each skips what is not its own.
    """

    def __init__(self, number: int, paths: Sequence[Path]) -> None:
        self.batch_ns = 0  # when the batch came whose outputs are being processed
        self.is_on = True
        self._number, self._sender = number, ReportSender(paths)
        self._hooks = Hooks()
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._is_flush_due = False
        self._begin()

    def _begin(self) -> None:
        self._taken: list[TakenRow] = []
        self._names: list[str] = []
        self._chunks: list[tuple[int, int, int]] = []
        self._ended: list[tuple[int, str]] = []

    def hook(self, processor: Any) -> None:
        wrap = self._hooks.wrap
        wrap(processor, "add_request", lambda add: self._then(add, self._added))
        wrap(processor, "process_outputs", self._around_process)
        wrap(processor, "abort_requests", lambda abort: self._then(abort, self._note_ended))

    def guard(self, ours: Callable[..., object], *args: object) -> None:
        """Call `ours`; after an error, watch no more."""
        if not self.is_on:
            return
        try:
            ours(*args)
        except Exception as error:  # noqa: BLE001 - vLLM never sees it
            self.is_on = False
            self.batch_ns = 0
            self._hooks.restore()
            log.warning("stepscope watches this API server no more: %r", error)

    def _then(self, method: Callable[..., Any], ours: Callable[..., None]) -> Callable[..., Any]:
        def stepscope_then(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.guard(ours, result, *args)
            return result

        return stepscope_then

    def _around_process(self, process: Callable[..., Any]) -> Callable[..., Any]:
        process = self._then(process, self._processed)

        def stepscope_process_outputs(*args: Any, **kwargs: Any) -> Any:
            self.batch_ns = monotonic_ns()
            try:
                return process(*args, **kwargs)
            finally:
                self.batch_ns = 0

        return stepscope_process_outputs

    def _added(self, result: None, request: Any, *args: Any) -> None:
        name, queue = request.request_id, args[-1]
        if name in self._numbers or getattr(request, "resumable", False):
            return
        number, self._next_number = self._next_number, self._next_number + 1
        vars(queue).setdefault(_STREAM, Stream(self)).numbers.append(number)
        keep(self._numbers, name, number)
        sampling = request.sampling_params
        is_streamed = sampling is not None and sampling.output_kind.name != "FINAL_ONLY"
        self._taken.append(TakenRow(number, _http_ns.get(), monotonic_ns(), is_streamed))
        self._names.append(name)
        self._flush_soon()

    def _processed(self, result: Any, outputs: Any, *args: Any) -> None:
        self._note_ended(result.reqs_to_abort, reason="stop")
        for output in outputs:
            if output.finish_reason is not None:
                self._numbers.pop(output.request_id, None)

    def _note_ended(self, names: Sequence[str], *args: Any, reason: str = "abort") -> None:
        for name in names:
            if (number := self._numbers.pop(name, None)) is not None:
                self._ended.append((number, reason))
        if self._ended:
            self._flush()  # before vLLM tells the engine

    def note_chunks(self, came: dict[int, int], now_ns: int) -> None:
        self._chunks += [(number, came_ns, now_ns) for number, came_ns in came.items()]
        if len(self._chunks) >= _MOST_CHUNKS:
            self._flush()
        else:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_later(_FLUSH_S, self.guard, self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._taken or self._chunks or self._ended:
            front = FrontEnd.of(self._number, self._taken, self._chunks, self._ended)
            self._sender.put(FrontReport(os.getpid(), front, self._names))
            self._begin()
        if not self._sender.flush():
            self._flush_soon()


def _hook_queues(queue_class: Any) -> None:
    put, get, get_nowait = queue_class.put, queue_class.get, queue_class.get_nowait
    close = queue_class.close  # called when the answer has gone out
    if hasattr(put, _STREAM):
        return

    def note(queue: Any, ours: Callable[..., None], *args: Any) -> None:
        if (stream := vars(queue).get(_STREAM)) is not None:
            stream.watch.guard(ours, stream, *args)

    def stepscope_put(self: Any, output: Any) -> None:
        note(self, Stream.put, output)
        put(self, output)

    def stepscope_get_nowait(self: Any) -> Any:
        note(self, Stream.sent)
        output = get_nowait(self)
        note(self, Stream.taken, output)
        return output

    async def stepscope_get(self: Any) -> Any:
        output = await get(self)
        note(self, Stream.taken, output)
        return output

    def stepscope_close(self: Any) -> None:
        note(self, Stream.sent)
        close(self)

    setattr(stepscope_put, _STREAM, True)
    queue_class.put, queue_class.get = stepscope_put, stepscope_get
    queue_class.get_nowait, queue_class.close = stepscope_get_nowait, stepscope_close


def _hook_http(application_class: Any) -> None:
    call = application_class.__call__
    if hasattr(call, _STREAM):
        return

    @functools.wraps(call)
    async def __call__(self: Any, scope: Any, receive: Any, send: Any) -> None:  # noqa: N807
        if scope["type"] == "http":
            _http_ns.set(monotonic_ns())
        await call(self, scope, receive, send)

    setattr(__call__, _STREAM, True)
    application_class.__call__ = __call__
