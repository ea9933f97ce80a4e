"""`TokenLedger`: checks a request's rows against each other, and against its output at the end.

A row begins where the one before it ended. The tokens that a request computed, and one more, are
its prompt and its output: so output is what was accepted, however many drafts a step checked.
"""

from stepscope.engine.protocol.wire import (
    Admitted,
    Arrived,
    BatchRow,
    Finished,
    Preempted,
    RequestEvent,
    Snapshot,
)


class TokenLedger:
    """How far each request is computed. Each problem is one line of text."""

    def __init__(self) -> None:
        self._num_prompt: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # position after the last row; missing if unknown
        self.num_checked = 0  # requests whose output was compared

    def forget(self) -> None:
        """Forget all requests, because messages are missing."""
        self._num_prompt.clear()
        self._ends.clear()

    def open(self, snapshot: Snapshot) -> None:
        """Take over the prompts of requests that arrived before."""
        for view in snapshot.requests:
            if view.max_tokens and not view.is_partial:
                self._num_prompt.setdefault(view.request_id, view.num_prompt_tokens)

    def take(self, batch: list[BatchRow] | None, events: list[RequestEvent]) -> list[str]:
        """Apply a step, or what happened between two steps."""
        for event in events:
            if isinstance(event, Arrived) and event.max_tokens:  # else it has no output
                self._num_prompt[event.request_id] = event.num_prompt_tokens
            elif isinstance(event, Admitted | Preempted):
                self._ends.pop(event.request_id, None)
        problems = [problem for row in batch or () if (problem := self._take_row(row))]
        for event in events:
            if isinstance(event, Finished):
                end = self._ends.pop(event.request_id, None)
                num_prompt = self._num_prompt.pop(event.request_id, None)
                if end is None or num_prompt is None or event.handed_to is not None:
                    continue
                self.num_checked += 1
                if (num_output := end + 1 - num_prompt) != event.num_output_tokens:
                    problems.append(
                        f"request {event.request_id} ended with {event.num_output_tokens:,} output "
                        f"tokens; by its rows {num_output:,}"
                    )
        return problems

    def _take_row(self, row: BatchRow) -> str | None:
        end = self._ends.get(row.request_id)
        self._ends[row.request_id] = row.start + row.num_tokens
        if end is None or end == row.start:
            return None
        return f"request {row.request_id} goes on at token {row.start:,}; its rows ended at {end:,}"
