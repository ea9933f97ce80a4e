"""In bf16 a request's logits have the same bits in any batch and with any prefill chunks.

So the same seed gives the same text on a busy engine as on an idle one.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stepscope.engine.protocol.engine_config import KVCacheDtype
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledStep
from stepscope.kernels.cpu.linear import BF16_LEVELS
from stepscope.kernels.dispatch.linear import Linear
from tests.support.cpu_levels import needs_level
from tests.support.engines.tiny_runner import load_tiny, next_row

pytestmark = needs_level(BF16_LEVELS[0])  # only our own product of bf16 guarantees it

BLOCK_SIZE = 16
NUM_OUTPUT = 6
# Around the edges of tiles and blocks; the 129 leave one token to the last of chunks of 64.
PROMPT_LENGTHS = (1, 5, 16, 33, 64, 129, 190)
MAX_MODEL_LEN = 256

Cut = Callable[[Request], int]  # the largest number of tokens in its next step


class Steps:
    """A runner, driven by hand with requests whose output tokens are forced."""

    def __init__(self, folder: Path, kv_cache_dtype: KVCacheDtype, threads: int) -> None:
        settings = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype, "threads": threads}
        self.runner = load_tiny(folder, block_size=BLOCK_SIZE, seq_capacity=16, **settings)
        self.logits = torch.empty(0)
        forward = self.runner._model.forward

        def seen(*arguments: torch.Tensor) -> torch.Tensor:
            self.logits = forward(*arguments).clone()
            return self.logits

        self.runner._model.forward = seen  # type: ignore[method-assign, assignment]
        rng = random.Random(3)
        self.prompts = [[rng.randrange(256) for _ in range(n)] for n in PROMPT_LENGTHS]
        self.outputs = [[rng.randrange(256) for _ in range(NUM_OUTPUT)] for _ in self.prompts]

    def logits_of(self, numbers: list[int], cut: Cut) -> dict[int, list[torch.Tensor]]:
        """The logits before each output token of these requests, which share all steps."""
        free = list(range(self.runner.num_blocks))
        random.Random(len(numbers)).shuffle(free)
        requests = [self._request(number, free) for number in numbers]
        logits: dict[int, list[torch.Tensor]] = {number: [] for number in numbers}
        while live := [r for r in requests if r.num_output_tokens < NUM_OUTPUT]:
            rows = [next_row(request, cut(request)) for request in live]
            self.runner.execute(ScheduledStep(0, rows))
            seen = iter(self.logits)
            for row in rows:
                request = row.request
                request.num_computed_tokens += row.num_tokens
                if row.samples:
                    logits[request.request_id].append(next(seen))
                    token = self.outputs[request.request_id][request.num_output_tokens]
                    request.token_ids.append(token)
        return logits

    def _request(self, number: int, free: list[int]) -> Request:
        prompt = self.prompts[number]
        sampling = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)
        request = Request(number, list(prompt), sampling, arrival_ns=0)
        num_blocks = -(-(len(prompt) + NUM_OUTPUT) // BLOCK_SIZE)
        request.block_table = [free.pop() for _ in range(num_blocks)]
        return request


@pytest.fixture(scope="module", autouse=True)
def _uses_our_products() -> None:
    if Linear(torch.zeros(2, 2, dtype=torch.bfloat16)).layout != "packed":
        pytest.skip("oneDNN multiplies bf16 faster here, with matrix instructions (AMX)")


SERVED = [("llama", "auto"), ("qwen3", "auto"), ("llama", "fp8_e4m3")]


@pytest.fixture(scope="module", params=SERVED, ids="-".join)
def steps(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Iterator[Steps]:
    threads = torch.get_num_threads()
    family, kv_cache_dtype = request.param
    yield Steps(tiny_checkpoint(family), kv_cache_dtype, threads=1)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(steps: Steps) -> dict[int, list[torch.Tensor]]:
    """The logits of each request alone, with its prompt in one piece."""
    found = {}
    for number in range(len(steps.prompts)):
        found |= steps.logits_of([number], lambda request: MAX_MODEL_LEN)
    return found


def assert_same(found: dict[int, list[torch.Tensor]], alone: dict[int, list[torch.Tensor]]) -> None:
    assert len(found) == len(PROMPT_LENGTHS)
    for number, logits in found.items():
        assert len(logits) == NUM_OUTPUT
        for at, (actual, expected) in enumerate(zip(logits, alone[number], strict=True)):
            assert torch.equal(actual, expected), f"request {number}, output token {at}"


@pytest.mark.parametrize("chunk", [MAX_MODEL_LEN, 64, 7, 1, None], ids=str)
def test_other_requests_in_the_batch_and_chunk_sizes_change_no_bit_of_a_request(
    steps: Steps, alone: dict[int, list[torch.Tensor]], chunk: int | None
) -> None:
    """Without a size of chunks, each has another."""
    everyone = list(range(len(steps.prompts)))
    rng = random.Random(8)
    for _ in range(1 if chunk else 5):
        assert_same(steps.logits_of(everyone, lambda request: chunk or rng.randrange(1, 80)), alone)


def test_the_number_of_threads_changes_no_bit_of_a_request(
    steps: Steps, alone: dict[int, list[torch.Tensor]]
) -> None:
    torch.set_num_threads(2)
    try:
        found = steps.logits_of(list(range(len(steps.prompts))), lambda request: 50)
    finally:
        torch.set_num_threads(1)
    assert_same(found, alone)
