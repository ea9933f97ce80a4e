"""Accepts drafts (guessed tokens), and adds the several tokens of one step to a request.

A token is sampled at the position of each draft as if there were no drafts, with the random number
of this position of the output. Drafts are accepted as long as they equal the sampled tokens; the
first sampled token that differs replaces its draft and ends the burst.

This is rejection sampling (Leviathan et al., 2023) for a draft model that is always certain: a
draft is accepted with its probability in the model, and the token that replaces a rejected one is
distributed like the model without it. So the output has the model's distribution, and with the
same seed it equals the output without drafts.
"""

from collections.abc import Mapping, Sequence

from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, StepResult


def bursts_of(
    rows: Sequence[ScheduledRow], sampled_of: Mapping[int, list[int]]
) -> dict[int, list[int]]:
    """Make `StepResult.bursts` from the tokens sampled for each row, both by row index."""
    return {
        index: accepted(rows[index].request.draft_token_ids, sampled)
        for index, sampled in sampled_of.items()
        if has_drafts(rows[index])
    }


def accepted(draft_token_ids: Sequence[int], sampled_token_ids: list[int]) -> list[int]:
    """The tokens that a row adds to its request: the accepted drafts and one more.

    Args:
        sampled_token_ids: the tokens sampled at the position of each draft, and after the last one.
    """
    for index, (draft, sampled) in enumerate(zip(draft_token_ids, sampled_token_ids, strict=False)):
        if draft != sampled:
            return sampled_token_ids[: index + 1]
    return sampled_token_ids


def take_bursts(
    scheduler: Scheduler, rows: Sequence[ScheduledRow], result: StepResult
) -> tuple[list[Request], dict[int, list[int]]]:
    """`Scheduler.update` for a step with drafts.

    Adds the tokens of a request one by one, as if each came from a step of its own, until one ends
    the request. Then registers the full blocks in the prefix cache, by the accepted tokens.

    Returns:
        The requests that finished, and the tokens that each row with drafts added, by row index.
    """
    finished: list[Request] = []
    taken: dict[int, list[int]] = {}
    for index, (row, token_id) in enumerate(zip(rows, result.token_ids, strict=True)):
        if not has_drafts(row) or token_id is None:
            finished += scheduler.update([row], [token_id])
            continue
        burst = (result.bursts or {}).get(index, [token_id])
        taken[index] = _take(scheduler, row, burst, finished)
    return finished, taken


def last_taken(token_ids: Sequence[int | None], taken: Mapping[int, list[int]]) -> list[int | None]:
    """`token_ids`, with the last token that was added in place of each burst's own."""
    return [taken[i][-1] if i in taken else token_id for i, token_id in enumerate(token_ids)]


def has_drafts(row: ScheduledRow) -> bool:
    return row.phase is Phase.DECODE and row.num_tokens > 1


def _take(
    scheduler: Scheduler, row: ScheduledRow, burst: list[int], finished: list[Request]
) -> list[int]:
    """Add the tokens of `burst` to the request until one ends it; returns those added."""
    request = row.request
    request.draft_token_ids = []
    for index, token_id in enumerate(burst):
        one = row._replace(start=row.start + index, num_tokens=1)
        finished += scheduler.update([one], [token_id])
        if request.status is RequestStatus.FINISHED:
            return burst[: index + 1]
    scheduler.kv.register(request, request.num_computed_tokens)
    return burst
