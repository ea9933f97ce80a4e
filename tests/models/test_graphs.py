"""Decode by recorded graphs equals an ordinary step of any size, after any earlier steps.

Graphs need a GPU; here a stand-in launches what was recorded again.
"""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.execution import input_batch
from stepscope.engine.execution.graphs import (
    LARGEST_GRAPH,
    CudaDevice,
    StepGraphs,
    graph_sizes,
)
from stepscope.engine.execution.input_batch import (
    BlockTables,
    DecodeBuffers,
    InputBatch,
    StepInputs,
)
from stepscope.engine.execution.step_costs import trial_step
from stepscope.kernels.triton.plan import warm_up_steps
from tests.models.test_pieces import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    SCRATCH_SLOT,
    VOCAB_SIZE,
    replayed_steps,
    steps,
)
from tests.support.engines.relaunching import RelaunchingDevice

MAX_MODEL_LEN = 40


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


def eager(model: Model, batch: InputBatch) -> torch.Tensor:
    """Run a step without graphs."""
    size = len(batch.input_ids)
    buffers = DecodeBuffers(size, MAX_MODEL_LEN, BLOCK_SIZE, SCRATCH_SLOT, torch.device("cpu"))
    buffers.fill(batch, size)
    return model.forward(buffers.inputs(size, size))


def recorded(model: Model, most: int, told: list[float] | None = None) -> StepGraphs:
    buffers = DecodeBuffers(most, MAX_MODEL_LEN, BLOCK_SIZE, SCRATCH_SLOT, torch.device("cpu"))
    logits = torch.zeros(most, VOCAB_SIZE)
    sizes, device = graph_sizes(most), RelaunchingDevice()
    graphs = StepGraphs(sizes, model.forward, None, buffers, logits, device)
    graphs.record(lambda what, share: told.append(share) if told is not None else None)
    return graphs


@settings(max_examples=12)
@given(st.integers(0, 2**32))
def test_a_replayed_graph_gives_the_same_result_as_an_eager_step(seed: int) -> None:
    plain, replayed = Model(), Model()
    graphs = recorded(replayed, 6)
    each_step = steps(np.random.default_rng(seed), 20, most=5, only_decodes=True)
    for found, expected in replayed_steps(graphs, each_step, lambda batch: eager(plain, batch)):
        assert torch.equal(found, expected)
        # Padding has written to no request's slots.
        assert torch.equal(replayed.cache[:SCRATCH_SLOT], plain.cache[:SCRATCH_SLOT])


def test_the_largest_graph_is_recorded_first_and_progress_is_reported() -> None:
    model, told = Model(), []
    recorded(model, 6, told)
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


def test_the_stand_in_for_a_gpu_is_called_as_the_gpu_is() -> None:
    def methods(device: type) -> dict[str, inspect.Signature]:
        return {
            name: inspect.signature(method)
            for name, method in vars(device).items()
            if not name.startswith("_")
        }

    assert methods(RelaunchingDevice) == methods(CudaDevice)
