"""In fp32, greedy tokens equal those of the transformers library's `generate`, whatever the batch.

The checkpoints are small, random and saved by the tests; they are loaded the way any model is.
"""

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias
from unittest import mock

import pytest
import torch

from stepscope.engine.execution import loading
from stepscope.engine.protocol.engine_config import ModelImpl
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep
from tests.support.engines.kv_integrity import check_integrity
from tests.support.engines.tiny_runner import load_tiny, next_row, run_rows

LEAN = ("llama", "qwen2", "qwen3", "mistral")  # our own decoder runs these, and the library can too
OTHERS = ("gemma3_text", "gemma2", "phi3", "gpt_oss")
SERVED = [
    *((family, "lean") for family in LEAN),
    *((family, "transformers") for family in (*LEAN, *OTHERS)),
]
MAX_MODEL_LEN = 256
NUM_OUTPUT = 12
# Longer than every sliding window (12 and 20), one a multiple of the block size, one shorter.
PROMPT_LENGTHS = (5, 64, 45, 101)


Oracle: TypeAlias = Callable[[Path], Callable[[Sequence[int], int], list[int]]]


class Served:
    """A runner, and the library's own output for the prompts."""

    def __init__(
        self, folder: Path, model_impl: ModelImpl, oracle: Oracle, block_size: int = 16
    ) -> None:
        torch.manual_seed(0)
        with mock.patch.object(loading, "measure"):  # it takes longer than all else here
            self.runner = load_tiny(
                folder, model_impl=model_impl, block_size=block_size, seq_capacity=16
            )
        self.block_size = block_size
        rng = random.Random(5)
        self.prompts = [[rng.randrange(256) for _ in range(n)] for n in PROMPT_LENGTHS]
        self.generate = oracle(folder)
        self.expected = [self.generate(prompt, NUM_OUTPUT) for prompt in self.prompts]


@pytest.fixture(scope="module")
def oracle(greedy_oracle: Oracle) -> Oracle:
    """Asks the library once for what several tests compare with."""

    @functools.cache
    def of(folder: Path) -> Callable[[Sequence[int], int], list[int]]:
        generate = functools.cache(greedy_oracle(folder))
        return lambda prompt, num_output: generate(tuple(prompt), num_output)

    return of


@pytest.fixture(scope="module", params=SERVED, ids="-".join)
def served(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path], oracle: Oracle
) -> Served:
    family, model_impl = request.param
    return Served(tiny_checkpoint(family), model_impl, oracle)


def new_request(request_id: int, prompt: list[int], num_output: int = NUM_OUTPUT) -> Request:
    sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
    return Request(request_id, list(prompt), sampling, arrival_ns=0)


def assert_same(actual: list[int], expected: list[int], what: str) -> None:
    if actual != expected:
        pairs = zip(actual, expected, strict=False)
        at = next((i for i, (a, e) in enumerate(pairs) if a != e), min(len(actual), len(expected)))
        pytest.fail(f"{what}: output token {at} differs: {actual[at:][:3]} not {expected[at:][:3]}")


def run_by_hand(served: Served, chunk: int, together: bool) -> list[list[int]]:
    """All prompts in chunks of at most `chunk` tokens, over shuffled blocks.

    Together, every step holds all of them: some in prefill and some in decode.
    """
    blocks = list(range(served.runner.num_blocks))
    random.Random(chunk).shuffle(blocks)
    requests = [new_request(i, prompt) for i, prompt in enumerate(served.prompts)]
    for request in requests:
        total = request.num_prompt_tokens + NUM_OUTPUT
        request.block_table = [blocks.pop() for _ in range(-(-total // served.block_size))]
    groups = [requests] if together else [[request] for request in requests]
    for group in groups:
        while live := [r for r in group if r.num_output_tokens < NUM_OUTPUT]:
            run_rows(served.runner, [next_row(request, chunk) for request in live])
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("chunk", [1, 7, 64, MAX_MODEL_LEN])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "mixed"])
def test_prefill_chunks_of_any_size_give_the_tokens_of_transformers_generate(
    served: Served, chunk: int, together: bool
) -> None:
    actual = run_by_hand(served, chunk, together)
    for i, (tokens, expected) in enumerate(zip(actual, served.expected, strict=True)):
        assert_same(tokens, expected, f"prompt {i}")


class Engine:
    """The real scheduler with the runner, without the rest of the engine."""

    def __init__(self, served: Served, num_blocks: int | None = None, **knobs: object) -> None:
        limits = Limits(max_num_batched_tokens=1024, max_num_seqs=16, max_model_len=MAX_MODEL_LEN)
        self.kv = KVCacheManager(num_blocks or served.runner.num_blocks, served.block_size)
        defaults = {"max_num_batched_tokens": 1024, "max_num_seqs": 16}
        self.scheduler = Scheduler(self.kv, Knobs(**{**defaults, **knobs}), limits)  # type: ignore[arg-type]
        self.limits = limits
        self.runner = served.runner
        self.num_steps = 0
        self.rows: list[ScheduledRow] = []
        self.num_hit_tokens = 0

    def step(self) -> None:
        rows = self.scheduler.schedule()
        assert rows, "the scheduler has work but schedules nothing"
        result = self.runner.execute(ScheduledStep(self.num_steps, rows))
        self.scheduler.update(rows, result.token_ids)
        check_integrity(self.kv)
        self.num_hit_tokens += self.kv.counts().hit_tokens
        self.kv.drain_moves()
        self.scheduler.drain_events()
        self.rows += rows
        self.num_steps += 1

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work():
            self.step()
            assert self.num_steps < 5000, "the requests never end"

    def set(self, **changes: int | bool | str | float) -> None:
        self.scheduler.knobs = self.scheduler.knobs.changed(changes, self.limits)


def test_a_prefix_hit_gives_the_tokens_of_transformers_generate(served: Served) -> None:
    engine = Engine(served)
    prompt = served.prompts[3]
    first = new_request(1, prompt)
    engine.run(first)
    # The same prompt again, one that differs from half way on, and one admitted with both.
    same, other = new_request(2, prompt), new_request(3, prompt[:50] + served.prompts[2])
    engine.run(same, other)
    assert engine.num_hit_tokens >= 96 + 48
    assert_same(first.output_token_ids, served.expected[3], "without a hit")
    assert_same(same.output_token_ids, served.expected[3], "the same prompt")
    assert_same(
        other.output_token_ids, served.generate(other.prompt_token_ids, NUM_OUTPUT), "half of it"
    )


def test_a_prefix_hit_on_blocks_of_the_same_step_gives_tokens_of_transformers_generate(
    served: Served,
) -> None:
    engine = Engine(served)
    requests = [new_request(i, served.prompts[3]) for i in range(3)]
    engine.run(*requests)
    for request in requests:
        assert_same(request.output_token_ids, served.expected[3], f"request {request.request_id}")


def test_a_preempted_request_continues_with_the_same_tokens(served: Served) -> None:
    # 22 blocks would hold all three to their ends.
    engine = Engine(served, num_blocks=16, reserve="none", enable_prefix_caching=False)
    requests = [new_request(i, served.prompts[i], num_output=40) for i in (1, 2, 3)]
    engine.run(*requests)
    assert sum(request.num_preemptions for request in requests) > 0
    assert any(row.phase == Phase.RECOMPUTE for row in engine.rows)
    for request in requests:
        expected = served.generate(request.prompt_token_ids, 40)
        assert_same(request.output_token_ids, expected, f"request {request.request_id}")


def test_a_budget_change_in_mid_prompt_changes_no_token(served: Served) -> None:
    engine = Engine(served, max_num_batched_tokens=24)
    requests = [new_request(i, prompt) for i, prompt in enumerate(served.prompts)]
    for request in requests:
        engine.scheduler.add(request)
    rng = random.Random(1)
    while engine.scheduler.has_work():
        engine.step()
        engine.set(max_num_batched_tokens=rng.choice([4, 9, 33, 200]))
    half_done = [row for row in engine.rows if row.phase == Phase.PREFILL and not row.samples]
    assert len({row.num_tokens for row in half_done}) > 2
    for request, expected in zip(requests, served.expected, strict=True):
        assert request.status is RequestStatus.FINISHED
        assert_same(request.output_token_ids, expected, f"request {request.request_id}")


@pytest.mark.parametrize("block_size", [1, 5, 64])
@pytest.mark.parametrize(("family", "model_impl"), [("gemma3_text", "transformers"), SERVED[3]])
def test_the_block_size_changes_no_token(
    tiny_checkpoint: Callable[..., Path],
    oracle: Oracle,
    family: str,
    model_impl: ModelImpl,
    block_size: int,
) -> None:
    served = Served(tiny_checkpoint(family), model_impl, oracle, block_size)
    for i, tokens in enumerate(run_by_hand(served, 7, together=True)):
        assert_same(tokens, served.expected[i], f"prompt {i}")
