"""With `speculative=ngram` every request gets the same tokens as without, only sooner."""

import random
from collections.abc import Sequence

import pytest

from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.knobs import ConfigError, Knobs, Limits
from stepscope.engine.protocol.replies import Output
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobValue, Preempted
from stepscope.engine.scheduling.acceptance import bursts_of, has_drafts
from stepscope.engine.scheduling.ngram import NgramProposer
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import InFlight, ScheduledRow, ScheduledStep, StepResult
from stepscope.engine.text.text_stream import StopText
from stepscope.engine.text.tokenizer import TextStream
from stepscope.recordings.state.session import SessionState
from tests.support.engines.core_ends import Client
from tests.support.engines.kv_integrity import check_integrity
from tests.support.engines.whole_core import WholeCore

MAX_MODEL_LEN = 128
EOS = 9
LIMITS = Limits(max_num_batched_tokens=256, max_num_seqs=16, max_model_len=MAX_MODEL_LEN)


def next_token(before: Sequence[int]) -> int:
    """The next token of a model that mostly copies; its whole text decides when it does not."""
    if sum(before) % 7 == 0:
        return len(before) % 10
    return before[-3] if len(before) > 3 else 1


class CopyingRunner:
    """Computes tokens from the rows, and fails if a row does not continue its text."""

    launch_blocks = False

    def __init__(self) -> None:
        self.now_ns = 0
        self.num_steps = 0

    def clock(self) -> int:
        self.now_ns += 1_000_000
        return self.now_ns

    def execute(self, step: ScheduledStep) -> StepResult:
        self.num_steps += 1
        sampled = {i: self.sampled(row) for i, row in enumerate(step.rows) if row.samples}
        bursts = bursts_of(step.rows, sampled)
        token_ids = [sampled[i][-1] if i in sampled else None for i in range(len(step.rows))]
        for index, burst in bursts.items():
            token_ids[index] = burst[-1]
        return StepResult(token_ids, self.clock(), self.clock(), bursts=bursts or None)

    def sampled(self, row: ScheduledRow) -> list[int]:
        tokens = row.request.token_ids
        if not has_drafts(row):
            assert row.start + row.num_tokens == len(tokens)
            return [next_token(tokens)]
        drafts = row.request.draft_token_ids
        assert row.num_tokens == 1 + len(drafts)
        return [next_token(tokens + drafts[:i]) for i in range(row.num_tokens)]

    def launch(self, step: ScheduledStep) -> InFlight:
        return Collected(self.execute(step))


class Collected:
    def __init__(self, result: StepResult) -> None:
        self.result = result

    def collect(self) -> StepResult:
        return self.result


class Engine(WholeCore):
    def __init__(self, num_blocks: int = 64, *, overlap: bool = False, **knobs: object) -> None:
        settings = {"max_num_batched_tokens": 64, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        limits = Limits(
            max_num_batched_tokens=256, max_num_seqs=16, max_model_len=min(128, num_blocks * 4)
        )
        super().__init__(
            limits,
            CopyingRunner(),
            num_blocks,
            4,
            {**settings, **knobs},
            eos_token_ids=frozenset((EOS,)),
            overlap=overlap,
        )
        self.kv = self.scheduler.kv
        self.core.publish_heartbeat(idle=True)

    def submit(  # type: ignore[override]
        self, prompt: list[int], sampling: SamplingParams, *, stream: bool = True
    ) -> Client:
        client = Client()
        submit = Submit(client_id="c", prompt_token_ids=prompt, sampling=sampling, stream=stream)
        stop_text = None
        if sampling.stop:
            text = TextStream(lambda token_ids: "".join(map(str, token_ids)))
            stop_text = StopText(text, sampling.stop, sampling.include_stop)
        self.core.inbox.put(Call(submit, client, prompt, stop_text))
        return client


def workload(seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(EOS + 1) for _ in range(rng.randint(1, 30))],
            SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=rng.random() < 0.5),
        )
        for _ in range(8)
    ]


def outputs(seed: int, **settings: object) -> tuple[list[list[int]], Engine]:
    engine = Engine(**settings)  # type: ignore[arg-type]
    clients = [engine.submit(*each) for each in workload(seed)]
    engine.run()
    assert engine.kv.num_held == 0
    return [client.tokens for client in clients], engine


@pytest.mark.parametrize("order", ["decode_first", "arrival"])
@pytest.mark.parametrize("num_blocks", [64, 14], ids=["room", "preempting"])
@pytest.mark.parametrize("budget", [3, 16, 64])
def test_outputs_equal_those_without_speculation(order: str, num_blocks: int, budget: int) -> None:
    num_accepted = num_preempted = 0
    for seed in range(12):
        common = {"num_blocks": num_blocks, "order": order, "max_num_batched_tokens": budget}
        expected, plain = outputs(seed, **common)
        actual, engine = outputs(seed, speculative="ngram", **common)
        assert actual == expected
        if budget == 64 and num_blocks == 64:
            assert engine.runner.num_steps <= plain.runner.num_steps
        drafts = [draft for record in engine.sink.records for draft in record.drafts or ()]
        num_accepted += sum(draft.num_accepted for draft in drafts)
        events = [event for record in engine.sink.records for event in record.events]
        num_preempted += sum(isinstance(event, Preempted) for event in events)
    assert num_accepted > 0 or budget == 3
    assert (num_preempted > 0) == (num_blocks == 14)


@pytest.mark.parametrize("batching", ["naive", "continuous", "separate"])
def test_every_batching_mode_but_static_uses_drafts(batching: str) -> None:
    expected, _ = outputs(3, batching=batching)
    actual, engine = outputs(3, batching=batching, speculative="ngram")
    assert actual == expected
    assert any(record.drafts for record in engine.sink.records)


def test_no_step_with_drafts_exceeds_the_budget() -> None:
    for seed in range(6):
        _, engine = outputs(seed, speculative="ngram", max_num_batched_tokens=12)
        for record in engine.sink.records:
            assert record.num_prefill_tokens + record.num_decode_tokens <= 12
            kept = sum(row.num_tokens for row in record.batch or ())
            rejected = sum(d.num_drafted - d.num_accepted for d in record.drafts or ())
            assert kept + rejected == record.num_prefill_tokens + record.num_decode_tokens


def test_the_session_state_counts_every_accepted_draft_token() -> None:
    expected, engine = outputs(1, speculative="ngram")
    state = SessionState()
    for message in engine.sink.messages:
        state.apply(message)
    assert [state.requests[i].num_output_tokens for i in range(8)] == [
        len(each) for each in expected
    ]


def test_steps_with_drafts_run_without_overlap() -> None:
    expected, _ = outputs(2)
    actual, engine = outputs(2, overlap=True, speculative="ngram")
    assert actual == expected
    assert any(record.drafts for record in engine.sink.records)
    assert all(record.hidden_ns is None for record in engine.sink.records)


def test_speculation_can_be_switched_between_two_steps() -> None:
    expected, _ = outputs(4)
    engine = Engine()
    clients = [engine.submit(*each) for each in workload(4)]
    settings = ({"speculative": "ngram"}, {"num_speculative_tokens": 1}, {"speculative": "off"})
    number = 0
    while engine.core.step():
        changes = settings[number // 3 % 3]
        engine.core.set_knobs(changes)
        number += 1
    assert [client.tokens for client in clients] == expected
    most = max(d.num_drafted for record in engine.sink.records for d in record.drafts or ())
    assert most == 5


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_inside_accepted_drafts_ends_the_request_there(
    stream: bool, include_stop: bool
) -> None:
    prompt = [1, 2, 3, 4, 5] * 3

    def run(speculative: str, stop: str) -> tuple[list[int], str, Output, int]:
        engine = Engine(speculative=speculative)
        sampling = SamplingParams(
            max_tokens=40, ignore_eos=True, stop=(stop,), include_stop=include_stop
        )
        client = engine.submit(prompt, sampling, stream=stream)
        engine.run()
        assert engine.kv.num_held == 0
        text = "".join(output.text or "" for output in client.outputs)
        kept = sum(d.num_accepted for record in engine.sink.records for d in record.drafts or ())
        return client.tokens, text, client.outputs[-1], kept

    whole, _, _, _ = run("off", "x")
    digits = "".join(map(str, whole))
    num_accepted = 0
    for length in (1, 2, 3):
        for stop in {digits[at : at + length] for at in range(len(digits) - length)}:
            token_ids, text, last, _ = run("off", stop)
            found = run("ngram", stop)
            assert found[:2] == (token_ids, text)
            for name in ("finish_reason", "stop", "num_output_tokens"):
                assert getattr(found[2], name) == getattr(last, name)
            assert text == digits[: digits.index(stop) + len(stop) * include_stop]
            num_accepted += found[3]
    assert num_accepted > 100


def test_an_abort_frees_the_blocks_of_drafts() -> None:
    engine = Engine(speculative="ngram")
    engine.submit([1, 2, 3] * 5, SamplingParams(max_tokens=60, ignore_eos=True))
    while not any(record.drafts for record in engine.sink.records):
        assert engine.core.step()
    engine.core.abort(0, "test")
    assert engine.kv.num_held == 0
    check_integrity(engine.kv)


def request_of(token_ids: list[int], **sampling: object) -> Request:
    return Request(0, token_ids, SamplingParams(max_tokens=50, **sampling), 0)  # type: ignore[arg-type]


def test_drafts_follow_the_longest_repetition_and_of_equal_ones_the_earliest() -> None:
    proposer = NgramProposer(2, 3, 4)
    assert proposer.propose(request_of([5, 1, 2, 7, 8, 1, 2, 9, 0, 1, 2]), 10) == [7, 8, 1, 2]
    assert proposer.propose(request_of([1, 2, 7, 6, 1, 2, 8, 6, 1, 2]), 10) == [8, 6, 1, 2]
    assert proposer.propose(request_of([1, 2, 3, 4, 5, 4]), 10) == []


def test_drafts_respect_max_tokens_budget_penalties_and_logprobs() -> None:
    proposer = NgramProposer(1, 2, 8)
    request = request_of([1, 2] * 6)
    assert len(proposer.propose(request, 3)) == 3
    request.max_num_tokens = request.num_tokens + 2
    assert len(proposer.propose(request, 10)) == 1
    request.max_num_tokens = request.num_tokens + 1
    assert proposer.propose(request, 10) == []
    # None with a penalty or with logprobs.
    assert proposer.propose(request_of([1, 2] * 6, presence_penalty=0.5), 5) == []
    assert proposer.propose(request_of([1, 2] * 6, logprobs=1), 5) == []


@pytest.mark.parametrize(
    "changes",
    [{"speculative": "ngram", "batching": "static"}, {"prompt_lookup_min": 6}],
    ids=["static", "lookup"],
)
def test_conflicting_speculation_settings_are_refused(changes: dict[str, KnobValue]) -> None:
    with pytest.raises(ConfigError, match=r"speculative=ngram|prompt_lookup_max"):
        Knobs(max_num_seqs=16, max_num_batched_tokens=64).changed(changes, LIMITS)
