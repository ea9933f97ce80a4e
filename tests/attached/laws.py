"""What an attachment to vLLM promises, checked on a real server. Each law raises AssertionError."""

from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from stepscope.engine.protocol.wire import Preempted
from stepscope.engine.protocol.wire_rows import TICK_NS
from tests.adapters.laws import check_computed_tokens
from tests.attached.published import Published
from tests.attached.real_server import Answer

MIN_PREEMPTIONS = 50


def every_request_is_accounted_for(
    published: Published, answers: Sequence[Answer], least: int = MIN_PREEMPTIONS
) -> str:
    """The tokens in a request's rows are its prompt and output, less one and its prefix hit."""
    check_computed_tokens(published)
    for answer in answers:
        request_id = published.request_id(answer.request_id)
        assert request_id is not None, f"{answer.request_id} never arrived"
        end = published.ends.get(request_id)
        assert end is not None, f"{answer.request_id} never ended"
        assert end.num_output_tokens == answer.num_output_tokens, answer.request_id
    num_preemptions = len(published.of(Preempted))
    assert num_preemptions >= least, f"only {num_preemptions} preemptions"
    return f"{len(answers)} requests, {num_preemptions} preemptions"


def the_front_end_tells_of_every_chunk(published: Published, answers: Sequence[Answer]) -> str:
    """Each chunk of an answer, after its client had sent the request and before it read it."""
    num_chunks = 0
    for answer in answers:
        request_id: Any = published.request_id(answer.request_id)
        taken = published.taken[request_id]
        chunks = sorted(published.chunks[request_id])
        assert len(chunks) == len(answer.chunks_ns), answer.request_id
        assert answer.sent_ns <= taken.http_ns <= taken.sent_ns, answer.request_id
        for (came_ns, out_ns), read_ns in zip(chunks, answer.chunks_ns, strict=True):
            assert taken.sent_ns - TICK_NS <= came_ns <= out_ns, answer.request_id
            assert came_ns - TICK_NS <= read_ns, answer.request_id
        num_chunks += len(chunks)
    return f"{num_chunks} chunks of {len(answers)} requests"


def every_step_is_published_once(published: Published, calls: Sequence[dict[str, Any]]) -> str:
    """Step numbers have no gap; tokens are as vLLM scheduled them, within the current budget."""
    scheduled = [call["tokens"] for call in calls if call["call"] == "schedule"]
    steps = published.steps
    assert [step.step for step in steps] == list(range(steps[0].step, steps[0].step + len(steps)))
    assert len(steps) + steps[0].step == len(scheduled), "a step was not published"
    for step, tokens in zip(steps, scheduled[steps[0].step :], strict=True):
        rows = sum(row.num_tokens for row in step.batch or ())
        assert rows == step.num_prefill_tokens + step.num_decode_tokens, f"step {step.step}"
        assert rows + (step.num_wasted_tokens or 0) == tokens, f"step {step.step}"
        assert tokens <= step.token_budget, f"step {step.step} is over its budget"
    ahead = sum(step.hidden_ns is not None for step in steps)
    return f"{len(steps)} steps, {ahead} scheduled while another ran"


def used_blocks_are_the_pools(published: Published, calls: Sequence[dict[str, Any]]) -> str:
    """After every step not scheduled ahead, used blocks equal the pool's; at the end none is."""
    used = [call["used"] for call in calls if call["call"] == "update"]
    first, num_equal = published.steps[0].step, 0
    is_synchronous = all(step.hidden_ns is None for step in published.steps)
    for step, expected in zip(published.steps, used[first:], strict=True):
        assert step.kv is not None, "the pool is unknown"
        if step.kv.used == expected:
            num_equal += 1
        else:
            assert not is_synchronous, f"step {step.step}: {step.kv.used}, not {expected}"
    num_left = published.statuses[-1].kv.used
    assert num_left == 0, f"{num_left} blocks are used by nobody"
    return f"equal after {num_equal} of {len(used) - first} steps"


def used_blocks_of_each_group_are_its_managers(
    published: Published, calls: Sequence[dict[str, Any]]
) -> str:
    """After every step, the used blocks of each group are those in its block tables in vLLM."""
    tables = [call["tables"] for call in calls if call["call"] == "update"]
    groups = published.infos[0].kv_groups or ()
    assert len(groups) > 1
    for step, used in zip(published.steps, tables[published.steps[0].step :], strict=True):
        rest = iter(used)  # vLLM has the tables of a group next to each other
        expected = [sum(islice(rest, group.num_tables)) for group in groups]
        assert [each.used for each in step.kv_groups or ()] == expected, f"step {step.step}"
    return f"{', '.join(group.kind for group in groups)}: {len(published.steps)} steps"


def a_budget_holds_from_the_answered_step(
    published: Published, changes: Sequence[tuple[int, int]], refused: Collection[int]
) -> str:
    """`changes` are (first step, budget), `refused` budgets above the one at the start."""
    for step in published.steps:
        expected = next((budget for first, budget in reversed(changes) if step.step >= first), 512)
        assert step.token_budget == expected, f"step {step.step}: {step.token_budget}"
    denied = [each for each in published.audited if each.effective_step is None]
    assert len(denied) == len(refused), "a refusal is not in the audit trail"
    return f"{len(changes)} changes, {len(refused)} refused and audited"


def an_abort_is_published_once(published: Published, num_given_up: int) -> str:
    assert len(published.aborted) == len(set(published.aborted)), "an abort was published twice"
    assert len(published.aborted) == num_given_up, f"{len(published.aborted)} of {num_given_up}"
    return f"{num_given_up} aborts"


def nothing_private_is_published(
    payloads: Sequence[bytes], text: str, token_ids: Sequence[int]
) -> str:
    """Neither the common text of all prompts nor its tokens are in any message."""
    as_tokens = b"".join(msgspec.msgpack.encode(token) for token in token_ids)
    for payload in payloads:
        assert text.encode() not in payload, "the text of a prompt was published"
        assert as_tokens not in payload, "the tokens of a prompt were published"
    return f"{len(payloads)} messages"


def a_long_step_is_published_while_it_runs(published: Published, since_step: int) -> str:
    found = [each for each in published.in_flight if each.step >= since_step]
    assert found, "a step of two seconds was not published before it ended"
    ended = next(step for step in published.steps if step.step == found[0].step)
    assert ended.tokens_ns >= found[-1].time_ns
    assert ended.tokens_ns - ended.schedule_start_ns > 1_900_000_000
    return f"{len(found)} messages in two seconds"


def steps_name_their_graph(published: Published) -> str:
    """The servers run without graphs (`--enforce-eager`), and vLLM reports that for each step."""
    kinds = {step.cuda_graph for step in published.steps}
    assert kinds == {"none"}, kinds
    assert {info.max_graph_tokens for info in published.infos} == {None}
    padded = sum(step.num_graph_padding or 0 for step in published.steps)
    return f"none in {len(published.steps)} steps, {padded} tokens of padding"


def nothing_of_ours_is_there(folder: Path, calls: Sequence[dict[str, Any]]) -> str:
    """vLLM has no socket, thread or module of stepscope."""
    assert calls[0] == {"call": "first", "modules": [], "threads": []}, calls[0]
    no_socket_is_left(folder)
    return "no module, no thread, no socket"


def no_socket_is_left(folder: Path) -> str:
    left = [path.name for path in folder.glob("vllm*")]
    assert not left, f"left behind: {', '.join(left)}"
    return "no file is left"
