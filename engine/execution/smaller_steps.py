"""A step for which a device has no memory is launched in halves instead of ending its requests.

Exact: the rows of a step are independent but for KV blocks that an earlier row fills and a later
one shares, and halves run in order; and a prompt may be cut into chunks anywhere. Drafts are left
out. A token that has no room by itself ends its row; the engine's loop decides what becomes of the
request.
"""

import logging
from collections.abc import Callable

from stepscope.engine.scheduling.acceptance import has_drafts
from stepscope.engine.scheduling.step import InFlight, ScheduledRow, ScheduledStep, StepResult

log = logging.getLogger("stepscope.engine")


class Halving:
    """Launches steps, whole or in parts.

    Nothing is launched upon a step that was cut (`is_whole`): where its tokens are before the host
    knows them is not kept.

    Args:
        launch: launches a step, or raises.
        is_out_of_memory: whether a smaller step may do where this exception was raised.
        free_memory: called before each further attempt.
        clock: nanoseconds, of the engine.
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
        """`launch(step)`, also where the step has to be cut to fit.

        Raises:
            Exception: whatever `launch` raises of another kind.
        """
        try:
            return self._launch(step)
        except Exception as error:
            if not self._is_out_of_memory(error):
                raise
        # Outside of the handler: until it ends, the error's traceback holds on to the step's
        # tensors.
        self._free_memory()
        first_part, second_part = halves(step)
        if not first_part.rows:
            return _Unfit(self._clock())
        first = self.launch(first_part)
        second = self.launch(second_part)
        return _JoinedSteps(step, first_part, second_part, first, second)


class _Unfit:
    """One token that found no memory."""

    is_whole = False

    def __init__(self, now_ns: int) -> None:
        self._now_ns = now_ns

    def collect(self) -> StepResult:
        now_ns = self._now_ns
        return StepResult([None], now_ns, now_ns, num_tokens_fit=0, unfit_rows=(0,))


class _JoinedSteps:
    """A step that was launched in two parts, one after the other."""

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
    """The step's tokens as two steps, as even as rows and chunks allow.

    The first has one token less if their number is odd, and none at all of a step of one token.
    """
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
    """The result of `step` from those of its halves."""
    first, second = results
    # The row that was cut, if any, is the last of the first half and the first of the second.
    num_first = len(parts[0].rows)
    offset = len(step.rows) - len(parts[1].rows)
    unfit = {*first.unfit_rows, *(offset + row for row in second.unfit_rows)}
    token_ids = first.token_ids[:offset] + second.token_ids
    logprobs = dict(first.logprobs or {})
    for index, found in (second.logprobs or {}).items():
        logprobs[index + offset] = found
    if offset < num_first and offset in unfit:
        # The beginning of a chunk is not there, so what its end was computed from is not either.
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
        cuda_graph=None if first.cuda_graph is None else "none",
    )


def _num_fit(part: ScheduledStep, result: StepResult) -> int:
    """Tokens of the largest piece of a part that ran."""
    if result.num_tokens_fit is not None:
        return result.num_tokens_fit
    return sum(row.num_tokens for row in part.rows)
