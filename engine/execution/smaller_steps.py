"""A step that the device has no memory for is run in halves instead of ending its requests.

Exact: the rows of a step are independent but for KV blocks that an earlier row fills and a later
one shares, and halves run in order; and a prompt may be cut into chunks anywhere.
"""

import logging
from collections.abc import Callable

from stepscope.engine.step import ScheduledRow, ScheduledStep, StepResult

log = logging.getLogger("stepscope.engine")


def run_in_halves(
    execute: Callable[[ScheduledStep], StepResult],
    step: ScheduledStep,
    is_out_of_memory: Callable[[BaseException], bool],
    free_memory: Callable[[], None],
) -> StepResult:
    """What `execute(step)` gives, also where the step has to be cut to fit.

    Args:
        execute: runs a step, or raises.
        is_out_of_memory: whether a smaller step may do where this exception was raised.
        free_memory: called before each further attempt.

    Raises:
        Exception: whatever `execute` raises of another kind, or for a step of one token.
    """
    try:
        return execute(step)
    except Exception as error:
        parts = halves(step) if is_out_of_memory(error) else None
        if parts is None:
            raise
        num_tokens = sum(row.num_tokens for row in step.rows)
        log.warning(
            "step %d of %d tokens ran out of device memory and is run in halves; "
            "lower max_num_batched_tokens to avoid it",
            step.step,
            num_tokens,
        )
    # Outside of the handler: until it ends, the error's traceback holds on to the step's tensors.
    free_memory()
    first, second = (run_in_halves(execute, part, is_out_of_memory, free_memory) for part in parts)
    return joined(step, parts[0], first, second)


def halves(step: ScheduledStep) -> tuple[ScheduledStep, ScheduledStep] | None:
    """The step's tokens as two steps, as even as rows and chunks allow; None: it has one token."""
    half = sum(row.num_tokens for row in step.rows) // 2
    if half == 0:
        return None
    first: list[ScheduledRow] = []
    second: list[ScheduledRow] = []
    left = half
    for row in step.rows:
        count = min(left, row.num_tokens)
        left -= count
        if count == row.num_tokens:
            first.append(row)
        elif count == 0:
            second.append(row)
        else:
            first.append(row._replace(num_tokens=count, samples=False))
            second.append(row._replace(start=row.start + count, num_tokens=row.num_tokens - count))
    return ScheduledStep(step.step, first), ScheduledStep(step.step, second)


def joined(
    step: ScheduledStep, first_part: ScheduledStep, first: StepResult, second: StepResult
) -> StepResult:
    """The result of `step` from those of its halves, `first_part` being the first of them."""
    # The row that was cut, if any, is the last of the first half and the first of the second.
    num_first = len(first_part.rows)
    num_second = len(second.token_ids)
    overlap = num_first + num_second - len(step.rows)
    token_ids = first.token_ids[: num_first - overlap] + second.token_ids
    logprobs = dict(first.logprobs or {})
    for index, found in (second.logprobs or {}).items():
        logprobs[index + num_first - overlap] = found
    device_ns = None
    if first.device_ns is not None and second.device_ns is not None:
        device_ns = first.device_ns + second.device_ns
    return StepResult(
        token_ids,
        first.launch_ns,
        second.tokens_ns,
        device_ns,
        num_padded_tokens=first.num_padded_tokens + second.num_padded_tokens,
        logprobs=logprobs,
    )
