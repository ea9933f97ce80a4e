"""vLLM's front end, as much of it as the plugin touches: output processor, queue, HTTP task."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

STREAMED = SimpleNamespace(name="DELTA")
AT_ONCE = SimpleNamespace(name="FINAL_ONLY")


class Queue:
    """`RequestOutputCollector`, of one request."""

    def __init__(self) -> None:
        self.output: Any = None
        self.ready = asyncio.Event()

    def put(self, output: Any) -> None:
        self.output = output
        self.ready.set()

    async def get(self) -> Any:
        while (output := self.output) is None:
            await self.ready.wait()
        self.output = None
        self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output

    def get_nowait(self) -> Any:
        output, self.output = self.output, None
        if output is not None:
            self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output

    def close(self) -> None:
        """vLLM calls it when the answer has gone out."""


class Processor:
    """`OutputProcessor`. `stopped`: requests whose next output ends in a stop string."""

    def __init__(self) -> None:
        self.queues: dict[str, Any] = {}
        self.stopped: set[str] = set()

    def add_request(self, request: Any, prompt: None, parent: None, index: int, queue: Any) -> None:
        self.queues[request.request_id] = queue

    def process_outputs(self, outputs: Sequence[Any], timestamp: float) -> Any:
        to_abort = []
        for output in outputs:
            queue = self.queues.get(output.request_id)
            if queue is None:
                continue
            if output.finish_reason == "error":  # as 0.33 while it is paused
                queue.put(ConnectionRefusedError("Generation is paused"))
                del self.queues[output.request_id]
                continue
            is_stopped = output.request_id in self.stopped
            finished = is_stopped or output.finish_reason is not None
            queue.put(SimpleNamespace(finished=finished, outputs=[SimpleNamespace(index=0)]))
            if finished:
                del self.queues[output.request_id]
            if is_stopped:
                to_abort.append(output.request_id)
        return SimpleNamespace(reqs_to_abort=to_abort)

    def abort_requests(self, names: Sequence[str], internal: bool) -> list[str]:
        return [name for name in names if self.queues.pop(name, None) is not None]


def request(name: str, kind: Any = STREAMED) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(output_kind=kind))


def output(name: str, finish_reason: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, finish_reason=finish_reason)


async def generate(queue: Any) -> AsyncIterator[Any]:
    """`AsyncLLM.generate`, from the queue on."""
    try:
        finished = False
        while not finished:
            out = queue.get_nowait() or await queue.get()
            finished = out.finished
            yield out
    finally:
        queue.close()


async def stream(queue: Any, write: Callable[[Any], None]) -> None:
    """The HTTP task of a request."""
    async for out in generate(queue):
        write(out)
