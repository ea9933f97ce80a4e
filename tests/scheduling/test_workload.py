"""Generated workloads: the same seed gives the same work, lengths fit, prefixes are shared."""

import re
import threading
import time
from typing import Any

import pytest

from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.workload.arrivals import (
    Arrival,
    PromptWriter,
    describe,
    english,
    fit,
    from_trace,
    questions,
    synthetic,
)
from stepscope.engine.workload.load import WorkloadDriver
from stepscope.engine.workload.traces import HASH_BLOCK_TOKENS, TraceRow
from tests.support.waiting import wait_for

WAIT_S = 20.0


@pytest.fixture(scope="module")
def writer() -> PromptWriter:
    return PromptWriter(chars_per_token=2.0)


def mix(writer: PromptWriter, num: int, **fields: float) -> list[Arrival]:
    spec = WorkloadSpec(num_requests=num, **fields)
    return list(synthetic(spec, writer, max_model_len=4096))


def test_a_prompt_starts_at_a_word_of_prose_and_may_be_longer_than_all_of_it(
    writer: PromptWriter,
) -> None:
    text = english()
    prompt = writer.unique(1, 30).removeprefix("(1) ")
    assert f" {prompt}" in text
    assert not re.search(r"\n|[=({]{2}", prompt)
    assert len(writer.unique(10**9, len(text))) >= 2 * len(text)


def test_equal_seeds_make_equal_workloads_and_other_seeds_do_not(writer: PromptWriter) -> None:
    first = mix(writer, 40, seed=3)
    assert first == mix(writer, 40, seed=3)
    other = mix(writer, 40, seed=4)
    assert [a.offset_s for a in first] != [a.offset_s for a in other]
    assert not {a.prompt for a in first} & {a.prompt for a in other}


def test_a_generated_workload_keeps_its_rate_document_share_and_mean_lengths(
    writer: PromptWriter,
) -> None:
    arrivals = mix(writer, 4000, rate=5.0, document_share=0.25, document_tokens=1000)
    chats = [a for a in arrivals if a.kind == "chat"]
    documents = [a for a in arrivals if a.kind == "document"]
    offsets = [a.offset_s for a in arrivals]
    assert offsets == sorted(offsets)
    assert 4000 / offsets[-1] == pytest.approx(5.0, rel=0.1)
    assert len(documents) / 4000 == pytest.approx(0.25, rel=0.1)
    assert sum(a.num_prompt_tokens for a in chats) / len(chats) == pytest.approx(128, rel=0.1)
    mean = sum(a.num_prompt_tokens for a in documents) / len(documents)
    assert mean == pytest.approx(1000, rel=0.1)
    assert sum(a.max_tokens for a in arrivals) / 4000 == pytest.approx(64, rel=0.1)


def test_prompts_differ_but_chats_share_their_system_prompt(writer: PromptWriter) -> None:
    arrivals = mix(writer, 300, document_share=0.3)
    assert len({a.prompt for a in arrivals}) == 300
    assert all(len(a.prompt) >= 2.0 * a.num_prompt_tokens for a in arrivals)
    chats = [a for a in arrivals if a.kind == "chat" and a.num_prompt_tokens > 40]
    documents = [a for a in arrivals if a.kind == "document"]
    shared_chars = 32 * 2  # a quarter of 128 tokens, at 2 characters each
    assert len({a.prompt[:shared_chars] for a in chats}) == 1
    assert len({a.prompt[:16] for a in documents}) == len(documents)


def test_requests_too_long_for_the_model_are_cut_and_marked(writer: PromptWriter) -> None:
    arrivals = mix(writer, 200, document_share=0.5, document_tokens=4000)
    assert all(a.num_prompt_tokens + a.max_tokens <= 4096 for a in arrivals)
    cut = [a for a in arrivals if a.is_cut]
    assert cut
    assert all(a.num_prompt_tokens + a.max_tokens == 4096 for a in cut)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ((100, 50), (100, 50, False)),
        ((4000, 96), (4000, 96, False)),
        ((4000, 97), (3999, 97, True)),
        ((100_000, 200), (3896, 200, True)),
        ((10, 100_000), (10, 2048, True)),
        ((100_000, 100_000), (2048, 2048, True)),
    ],
)
def test_cutting_a_request_shortens_the_prompt_before_the_output(
    asked: tuple[int, int], given: tuple[int, int, bool]
) -> None:
    assert fit(*asked, max_model_len=4096) == given


def test_equal_hash_ids_of_a_trace_make_exactly_the_shared_text(writer: PromptWriter) -> None:
    rows = [
        TraceRow(0.0, 2000, 5, (7, 8, 9, 10)),
        TraceRow(1.0, 2000, 5, (7, 8, 9, 11)),
        TraceRow(2.0, 1000, 5, (7, 12)),
        TraceRow(3.0, 900, 5, (13, 8)),
    ]
    a, b, c, d = (arrival.prompt for arrival in from_trace(rows, writer, None))
    block_chars = HASH_BLOCK_TOKENS * 2
    assert a[: 3 * block_chars] == b[: 3 * block_chars]
    assert a[: 3 * block_chars + 8] != b[: 3 * block_chars + 8]
    assert a[:block_chars] == c[:block_chars]
    assert a[: block_chars + 8] != c[: block_chars + 8]
    assert a[:8] != d[:8]
    assert d[block_chars : 2 * block_chars] == a[block_chars : 2 * block_chars]


def test_a_trace_is_replayed_on_its_own_time_scale(writer: PromptWriter) -> None:
    rows = [TraceRow(0.0, 10, 5), TraceRow(4.0, 20, 6)]
    arrivals = list(from_trace(rows, writer, 4096, time_scale=0.25))
    assert [a.offset_s for a in arrivals] == [0.0, 1.0]
    assert [(a.num_prompt_tokens, a.max_tokens) for a in arrivals] == [(10, 5), (20, 6)]
    assert arrivals[0].prompt != arrivals[1].prompt


def test_a_generated_request_asks_for_exactly_its_prompt_and_output_lengths(
    writer: PromptWriter,
) -> None:
    arrival = mix(writer, 1, temperature=0.7)[0]
    submit = arrival.submit()
    assert submit.max_prompt_tokens == arrival.num_prompt_tokens
    assert submit.sampling.max_tokens == arrival.max_tokens
    assert submit.sampling.ignore_eos
    assert submit.sampling.seed is not None


class Inbox:
    """Collects what a driver submits."""

    def __init__(self) -> None:
        self.taken: list[Submit] = []
        self._changed = threading.Condition()

    def submit(self, command: Submit) -> None:
        with self._changed:
            self.taken.append(command)
            self._changed.notify_all()

    def wait_for(self, num: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.taken) >= num, WAIT_S)


def driver_of(inbox: Inbox, **options: Any) -> WorkloadDriver:
    options.setdefault("num_unfinished", lambda: 0)
    return WorkloadDriver(inbox.submit, chars_per_token=1.0, max_model_len=4096, **options)


def test_the_load_driver_submits_until_it_is_stopped() -> None:
    inbox = Inbox()
    driver = driver_of(inbox)
    assert driver.spec is None
    driver.set(WorkloadSpec(rate=500.0))
    assert driver.spec == WorkloadSpec(rate=500.0)
    inbox.wait_for(5)
    driver.set(None)
    num = len(inbox.taken)
    assert driver.spec is None
    time.sleep(0.1)
    assert len(inbox.taken) == num


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("rate", 3.0), ("document_share", 0.5), ("chat_tokens", 99), ("document_tokens", 999)),
        *(("output_tokens", 9), ("max_concurrency", 4), ("temperature", 0.5), ("questions", True)),
    ],
)
def test_every_change_of_a_workload_changes_its_description(field: str, value: Any) -> None:
    """The audit, comparisons and the demo identify a workload by its description."""
    assert describe(WorkloadSpec(**{field: value})) != describe(WorkloadSpec())


def test_a_new_workload_replaces_the_old_one_and_a_bounded_workload_ends() -> None:
    inbox = Inbox()
    driver = driver_of(inbox)
    driver.set(WorkloadSpec(rate=0.001))
    driver.set(WorkloadSpec(rate=500.0, num_requests=7))
    inbox.wait_for(7)
    wait_for(lambda: driver.spec is None)
    assert len(inbox.taken) == 7
    driver.set(None)


def test_at_most_max_concurrency_requests_run_at_a_time() -> None:
    inbox = Inbox()
    num_ended = 0
    driver = driver_of(inbox, num_unfinished=lambda: len(inbox.taken) - num_ended)
    driver.set(WorkloadSpec(rate=2000.0, max_concurrency=3))
    inbox.wait_for(3)
    time.sleep(0.15)
    assert len(inbox.taken) == 3
    num_ended = 2
    inbox.wait_for(5)
    time.sleep(0.15)
    assert len(inbox.taken) == 5
    driver.set(None)


def test_chats_for_a_real_model_are_questions_whose_answers_may_end_early(
    writer: PromptWriter,
) -> None:
    spec = WorkloadSpec(questions=True, document_share=0.5, num_requests=40)
    by_kind: dict[str, list[Submit]] = {"chat": [], "document": []}
    for arrival in synthetic(spec, writer, None):
        by_kind[arrival.kind].append(arrival.submit())
    for chat in by_kind["chat"]:
        assert chat.messages[0].content in questions()
        assert not chat.sampling.ignore_eos
    assert all(document.sampling.ignore_eos for document in by_kind["document"])
    assert len({chat.messages[0].content for chat in by_kind["chat"]}) > 10
