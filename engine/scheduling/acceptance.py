"""Decides which drafts (guessed tokens) of a step are accepted, and adds its tokens to requests.

A row is what a step computes for one request. At the position of each draft in a row, the runner
samples a token as if there were no drafts, with the random number that belongs to this position of
the output. Drafts are accepted as long as they equal the sampled tokens. The first sampled token
that differs replaces its draft and ends the burst (the tokens that a request gets in this step).

This is rejection sampling (Leviathan et al., 2023) for a draft model that is always certain. A
draft is accepted with the probability that the model gives it. The token that replaces a rejected
draft is distributed like a token of the model without that draft. So the output has the model's
distribution, and with the same seed it equals the output without drafts.
"""

from collections.abc import Mapping, Sequence

from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, StepResult


def bursts_of(
    rows: Sequence[ScheduledRow], sampled_of: Mapping[int, list[int]]
) -> dict[int, list[int]]:
    """Return `StepResult.bursts` for rows with drafts, from the tokens sampled for each row."""
    return {
        index: accepted(rows[index].request.draft_token_ids, sampled)
        for index, sampled in sampled_of.items()
        if has_drafts(rows[index])
    }


def accepted(draft_token_ids: Sequence[int], sampled_token_ids: list[int]) -> list[int]:
    """Return the tokens that a row adds: accepted drafts, and the token sampled after them."""
    for index, (draft, sampled) in enumerate(zip(draft_token_ids, sampled_token_ids, strict=False)):
        if draft != sampled:
            return sampled_token_ids[: index + 1]
    return sampled_token_ids


def take_bursts(
    scheduler: Scheduler, rows: Sequence[ScheduledRow], result: StepResult
) -> tuple[list[Request], dict[int, list[int]]]:
    """Add the tokens of a step with drafts to their requests; replaces `Scheduler.update` there.

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
        request, burst = row.request, (result.bursts or {}).get(index, [token_id])
        request.draft_token_ids = []
        for place, token in enumerate(burst):
            one = row._replace(start=row.start + place, num_tokens=1)
            finished += scheduler.update([one], [token])
            if request.status is RequestStatus.FINISHED:
                burst = burst[: place + 1]
                break
        else:
            scheduler.kv.register(request, request.num_computed_tokens)
        taken[index] = burst
    return finished, taken


def has_drafts(row: ScheduledRow) -> bool:
    return row.phase is Phase.DECODE and row.num_tokens > 1
