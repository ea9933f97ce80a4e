"""Launches a step in halves if the device is out of memory, instead of ending its requests.

The result is exact. Rows are independent, except that a later row may read KV blocks that an
earlier row fills, and the halves run in order. A prompt may be split into chunks anywhere. Drafts
are left out. If a single token does not fit, its row fails, and the engine's loop decides what
happens to the request.
"""

from collections.abc import Callable

from stepscope.engine.scheduling.acceptance import has_drafts
from stepscope.engine.scheduling.step import InFlight, ScheduledRow, ScheduledStep, StepResult


class Halving:
    """Launches steps, whole or in halves.

    If a step was launched in halves, the next step must wait for its result: do not pass it as
    `after` (see `is_whole`). The tokens of such a step cannot be found on the device.

    Args:
        is_out_of_memory: whether the exception means that a smaller step may fit.
        free_memory: called before each further attempt.
    """

    def __init__(
        self,
        launch: Callable[[ScheduledStep], InFlight],
        is_out_of_memory: Callable[[BaseException], bool],
        free_memory: Callable[[], None],
        clock: Callable[[], int],
    ) -> None:
        self._launch = launch
        self._is_out_of_memory = is_out_of_memory
        self._free_memory = free_memory
        self._clock = clock

    def launch(self, step: ScheduledStep) -> InFlight:
        """Launch `step`. If it does not fit in memory, launch its halves, one after the other."""
        try:
            return self._launch(step)
        except Exception as error:
            if not self._is_out_of_memory(error):
                raise
        # After the handler, because inside it the error's traceback keeps the step's tensors alive.
        self._free_memory()
        first_part, second_part = halves(step)
        if not first_part.rows:
            return _Unfit(self._clock())
        first = self.launch(first_part)
        second = self.launch(second_part)
        return _JoinedSteps(step, first_part, second_part, first, second)


class _Unfit:
    is_whole = False

    def __init__(self, now_ns: int) -> None:
        self._now_ns = now_ns

    def collect(self) -> StepResult:
        now_ns = self._now_ns
        return StepResult([None], now_ns, now_ns, num_tokens_fit=0, unfit_rows=(0,))


class _JoinedSteps:
    is_whole = False

    def __init__(
        self,
        step: ScheduledStep,
        first_part: ScheduledStep,
        second_part: ScheduledStep,
        first: InFlight,
        second: InFlight,
    ) -> None:
        self._step = step
        self._parts = first_part, second_part
        self._handles = first, second

    def collect(self) -> StepResult:
        results = [handle.collect() for handle in self._handles]
        return joined(self._step, self._parts, (results[0], results[1]))


def halves(step: ScheduledStep) -> tuple[ScheduledStep, ScheduledStep]:
    """Split a step evenly by tokens, rows too. The first half of a step of one token is empty."""
    rows = [row._replace(num_tokens=1) if has_drafts(row) else row for row in step.rows]
    half = sum(row.num_tokens for row in rows) // 2
    first: list[ScheduledRow] = []
    second: list[ScheduledRow] = []
    left = half
    for row in rows:
        count = min(left, row.num_tokens)
        left -= count
        if count == row.num_tokens:
            first.append(row)
        elif count == 0:
            second.append(row)
        else:
            first.append(row._replace(num_tokens=count, samples=False))
            second.append(row._replace(start=row.start + count, num_tokens=row.num_tokens - count))
    return (
        ScheduledStep(step.step, first, after=step.after),
        ScheduledStep(step.step, second, after=step.after),
    )


def joined(
    step: ScheduledStep,
    parts: tuple[ScheduledStep, ScheduledStep],
    results: tuple[StepResult, StepResult],
) -> StepResult:
    """Return the result of `step` from the results of its halves."""
    first, second = results
    # A row that was split is the last row of the first half and the first of the second.
    num_first = len(parts[0].rows)
    offset = len(step.rows) - len(parts[1].rows)
    unfit = {*first.unfit_rows, *(offset + row for row in second.unfit_rows)}
    unsound = {*first.unsound_rows, *(offset + row for row in second.unsound_rows)}
    token_ids = first.token_ids[:offset] + second.token_ids
    logprobs = dict(first.logprobs or {})
    for index, found in (second.logprobs or {}).items():
        logprobs[index + offset] = found
    if offset < num_first and offset in unfit:
        # The first part of the chunk failed, so the second part was computed without its keys.
        token_ids[offset] = None
        logprobs.pop(offset, None)
    device_ns = None
    if first.device_ns is not None or second.device_ns is not None:
        device_ns = (first.device_ns or 0) + (second.device_ns or 0)
    return StepResult(
        token_ids,
        first.launch_ns,
        second.tokens_ns,
        device_ns,
        num_padded_tokens=first.num_padded_tokens + second.num_padded_tokens,
        logprobs=logprobs,
        num_tokens_fit=max(_num_fit(*pair) for pair in zip(parts, results, strict=True)),
        unfit_rows=tuple(sorted(unfit)),
        unsound_rows=tuple(sorted(unsound)),
        cuda_graph=None if first.cuda_graph is None else "none",
    )


def _num_fit(part: ScheduledStep, result: StepResult) -> int:
    """Return the tokens of the largest step that fitted in memory, for a half of a step."""
    if result.num_tokens_fit is not None:
        return result.num_tokens_fit
    return sum(row.num_tokens for row in part.rows)
