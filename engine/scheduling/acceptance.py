"""Which drafts are accepted, and how a request takes in several tokens of one step.

A token is sampled at the place of each draft as if there were no drafts, with the random number
that belongs to this place of the output. Drafts are accepted as long as they are what was sampled;
the first token that differs takes the place of its draft and ends the burst.

That is rejection sampling (Leviathan et al., 2023) for drafts that are certain of themselves: a
draft is accepted with its probability in the model, and what is sampled instead of a rejected one
is distributed like the model without it. So the output has the model's distribution, and with the
same seed it is the output without drafts.
"""

from collections.abc import Mapping, Sequence

from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, StepResult


def bursts_of(
    rows: Sequence[ScheduledRow], sampled_of: Mapping[int, list[int]]
) -> dict[int, list[int]]:
    """`StepResult.bursts`, from the tokens sampled for each row, by its index."""
    return {
        index: accepted(rows[index].request.draft_token_ids, sampled)
        for index, sampled in sampled_of.items()
        if has_drafts(rows[index])
    }


def accepted(draft_token_ids: Sequence[int], sampled_token_ids: list[int]) -> list[int]:
    """The tokens that a row gives: accepted drafts and one more.

    Args:
        sampled_token_ids: at the place of each draft, and behind the last one.
    """
    for index, (draft, sampled) in enumerate(zip(draft_token_ids, sampled_token_ids, strict=False)):
        if draft != sampled:
            return sampled_token_ids[: index + 1]
    return sampled_token_ids


def take_bursts(
    scheduler: Scheduler, rows: Sequence[ScheduledRow], result: StepResult
) -> tuple[list[Request], dict[int, list[int]]]:
    """`Scheduler.update` for a step with drafts.

    A request takes its tokens one by one, as if each had come in a step of its own, until one ends
    it. Only then are blocks known by what is in them: by accepted tokens.

    Returns:
        The requests that finished, and the tokens that each row with drafts gave, by its index.
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
    """`token_ids` with the last token of each burst that was taken."""
    return [taken[i][-1] if i in taken else token_id for i, token_id in enumerate(token_ids)]


def has_drafts(row: ScheduledRow) -> bool:
    return row.phase is Phase.DECODE and row.num_tokens > 1


def _take(
    scheduler: Scheduler, row: ScheduledRow, burst: list[int], finished: list[Request]
) -> list[int]:
    """Returns what of `burst` the request took."""
    request = row.request
    request.draft_token_ids = []
    for index, token_id in enumerate(burst):
        one = row._replace(start=row.start + index, num_tokens=1)
        finished += scheduler.update([one], [token_id])
        if request.status is RequestStatus.FINISHED:
            return burst[: index + 1]
    scheduler.kv.register(request, request.num_computed_tokens)
    return burst
