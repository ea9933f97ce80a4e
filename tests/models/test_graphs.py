"""Decode by recorded graphs equals an ordinary step of any size, after any earlier steps.

Graphs need a GPU; here a stand-in launches what was recorded again.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.execution import input_batch
from stepscope.engine.execution.graph_inputs import DecodeBuffers, StepInputs
from stepscope.engine.execution.graphs import LARGEST_GRAPH, StepGraphs, graph_sizes
from stepscope.engine.execution.input_batch import BlockTables, InputBatch
from stepscope.engine.execution.step_costs import trial_step
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow
from stepscope.kernels.triton.plan import warm_up_steps
from tests.support.engines.relaunching import RelaunchingDevice

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, VOCAB_SIZE = 4, 64, 40, 11
SCRATCH_SLOT = NUM_BLOCKS * BLOCK_SIZE


class Model:
    """A model whose logits and cache depend on every input that a real model reads."""

    def __init__(self) -> None:
        self.cache = torch.zeros(SCRATCH_SLOT + BLOCK_SIZE, dtype=torch.int64)
        self.sizes: list[int] = []

    def forward(self, inputs: StepInputs, backend: object = None) -> torch.Tensor:
        self.sizes.append(len(inputs.input_ids))
        tensors = inputs.batch.on_device()
        self.cache[inputs.batch.slot_mapping] = 1000 * inputs.input_ids + inputs.positions
        logits = torch.zeros(len(inputs.logits_of), VOCAB_SIZE)
        for r in range(len(tensors.context_lens)):
            length = int(tensors.context_lens[r])
            assert tensors.query_starts[r + 1] - tensors.query_starts[r] == 1
            positions = torch.arange(length)
            blocks = tensors.block_tables[r, positions // BLOCK_SIZE].long()
            seen = self.cache[blocks * BLOCK_SIZE + positions % BLOCK_SIZE]
            logits[r, 0] = float((seen * (1 + positions)).sum() % 9973)
        return logits[inputs.logits_of]


def steps(rng: np.random.Generator, num_steps: int) -> Iterator[list[ScheduledRow]]:
    """Decodes of requests that arrive, grow and end, so that rows change places."""
    free = list(rng.permutation(NUM_BLOCKS))
    running: list[Request] = []
    for number in range(num_steps):
        if len(running) < 5 and (not running or rng.random() < 0.6):
            request = Request(
                number, rng.integers(0, 9, rng.integers(1, 9)).tolist(), SamplingParams(), 0
            )
            running.append(request)
        if len(running) > 1 and rng.random() < 0.3:
            gone = running.pop(int(rng.integers(len(running))))
            free.extend(gone.block_table)
        rows = []
        for request in running:
            start = request.num_tokens - 1
            while len(request.block_table) * BLOCK_SIZE <= start:
                request.block_table.append(int(free.pop()))
            rows.append(ScheduledRow(request, Phase.DECODE, start, 1, True))
        yield rows


def eager(model: Model, batch: InputBatch) -> torch.Tensor:
    """Run a step without graphs."""
    size = len(batch.input_ids)
    buffers = DecodeBuffers(size, MAX_MODEL_LEN, BLOCK_SIZE, SCRATCH_SLOT, torch.device("cpu"))
    buffers.fill(batch, size)
    return model.forward(buffers.inputs(size, size))


def recorded(model: Model, most: int) -> StepGraphs:
    sizes = graph_sizes(most)
    buffers = DecodeBuffers(most, MAX_MODEL_LEN, BLOCK_SIZE, SCRATCH_SLOT, torch.device("cpu"))
    logits = torch.zeros(most, VOCAB_SIZE)
    graphs = StepGraphs(sizes, model.forward, None, buffers, logits, RelaunchingDevice())
    graphs.record(lambda what, share: None)
    return graphs


@settings(max_examples=12)
@given(st.integers(0, 2**32))
def test_a_replayed_graph_gives_the_same_result_as_an_eager_step(seed: int) -> None:
    plain, replayed = Model(), Model()
    graphs = recorded(replayed, 6)
    tables, again = BlockTables(), BlockTables()
    tokens: dict[int, int] = {}  # known only on the device: rows of the step begin with them
    for rows in steps(np.random.default_rng(seed), 20):
        batch = input_batch.build(rows, tables, BLOCK_SIZE)
        for row in rows:
            if row.request.request_id in tokens:
                assert row.request.token_ids.pop() == tokens[row.request.request_id]
        unknown = input_batch.build(rows, again, BLOCK_SIZE, ahead=True)
        fed_at = list(unknown.fed_at)
        assert [tokens[name] for name in unknown.fed_by] == batch.input_ids[fed_at].tolist()
        assert not unknown.input_ids[fed_at].any()
        size = graphs.size_for(unknown)
        assert size >= len(rows)
        fed = torch.tensor([tokens[name] for name in unknown.fed_by], dtype=torch.int64)
        graphs.buffers.fill(unknown, size, fed if len(fed) else None)
        found = graphs.run(size, len(rows))
        assert torch.equal(found, eager(plain, batch))
        # Padding has written to no request's slots.
        assert torch.equal(replayed.cache[:SCRATCH_SLOT], plain.cache[:SCRATCH_SLOT])
        for row in rows:
            name = row.request.request_id
            row.request.token_ids += [tokens[name]] if name in tokens else []
            tokens[name] = int(found.argmax()) % 9
            row.request.token_ids.append(tokens[name])


def test_the_largest_graph_is_recorded_first_and_progress_is_reported() -> None:
    model = Model()
    told: list[float] = []
    sizes = graph_sizes(6)
    buffers = DecodeBuffers(6, MAX_MODEL_LEN, BLOCK_SIZE, SCRATCH_SLOT, torch.device("cpu"))
    graphs = StepGraphs(
        sizes, model.forward, None, buffers, torch.zeros(6, VOCAB_SIZE), RelaunchingDevice()
    )
    graphs.record(lambda what, share: told.append(share))
    assert model.sizes == [6, 4, 2, 1]
    assert told == [0, 0.25, 0.5, 0.75]


def test_graph_sizes_grow_up_to_the_capacity_or_the_largest_useful_size() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 32, 40]
    assert graph_sizes(256) == [1, 2, 4, 8, *range(16, 257, 16)]
    assert graph_sizes(60_000)[-1] == LARGEST_GRAPH


def test_steps_with_a_prefill_chunk_or_too_many_requests_run_without_a_graph() -> None:
    graphs = recorded(Model(), 6)

    def size_for(*lengths: tuple[int, int]) -> int | None:
        rows = trial_step(lengths, NUM_BLOCKS, BLOCK_SIZE).rows
        return graphs.size_for(input_batch.build(rows, BlockTables(), BLOCK_SIZE))

    assert size_for((3, 1), (0, 1), (9, 1)) == 4
    assert size_for((3, 1), (0, 2)) is None
    assert size_for((0, 2)) is None
    assert size_for(*[(3, 1)] * 6) == 6
    assert size_for(*[(3, 1)] * 7) is None


@pytest.mark.parametrize("max_model_len", [1, 16, 50, 400, 8192])
def test_warm_up_steps_are_no_longer_than_the_longest_request(max_model_len: int) -> None:
    pairs = warm_up_steps(max_model_len)
    assert len(set(pairs)) == len(pairs)
    assert all(count >= 1 and before + count <= max_model_len for before, count in pairs)
