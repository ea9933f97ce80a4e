"""A step whose parts between attentions are replayed equals an ordinary step of any requests.

Graphs need a GPU; here a stand-in launches what was recorded again.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.execution import input_batch
from stepscope.engine.execution.graphs import LARGEST_STEP, StepGraphs, piece_sizes
from stepscope.engine.execution.input_batch import BlockTables, InputBatch, StepInputs, TokenBuffers
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow
from stepscope.kernels.paged_attention import (
    AttentionBackend,
    AttentionOptions,
    LayerCache,
    PagedBatch,
    store_kv,
)
from stepscope.kernels.reference import ReferenceAttention
from tests.support.engines.relaunching import RelaunchingDevice

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE, NUM_LAYERS, HEADS, HEAD_DIM = 4, 64, 11, 2, 2, 4
SCRATCH_SLOT = NUM_BLOCKS * BLOCK_SIZE
MOST_LOGITS = 3


class Model:
    """Two layers of attention over a paged cache, in float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self._embeddings = drawn(VOCAB_SIZE, HEADS * HEAD_DIM)
        self._weights = [drawn(4, HEADS * HEAD_DIM, HEADS * HEAD_DIM) for _ in range(NUM_LAYERS)]
        shape = (2, NUM_BLOCKS + 1, BLOCK_SIZE, HEADS, HEAD_DIM)
        self.caches = [
            LayerCache(*torch.zeros(shape, dtype=torch.float64)) for _ in range(NUM_LAYERS)
        ]
        self.num_attentions = 0

    def forward(self, inputs: StepInputs, backend: AttentionBackend) -> torch.Tensor:
        x = self._embeddings[inputs.input_ids] + inputs.positions[:, None] / 7
        for weights, cache in zip(self._weights, self.caches, strict=True):
            q, k, v = ((x @ each).view(-1, HEADS, HEAD_DIM) for each in weights[:3])
            store_kv(k, v, cache, inputs.batch.slot_mapping)
            self.num_attentions += 1
            attended = backend(q, cache, inputs.batch, AttentionOptions(0.5))
            x = (x + attended.flatten(1) @ weights[3]).tanh()
        return x[inputs.logits_of] @ self._embeddings.T


def steps(
    rng: np.random.Generator, num_steps: int, most: int = MOST_LOGITS, *, only_decodes: bool = False
) -> Iterator[list[ScheduledRow]]:
    """Prompts in chunks of any size among decodes, in any order, of requests that come and end."""
    free = list(rng.permutation(NUM_BLOCKS))
    running: list[Request] = []
    for number in range(num_steps):
        if len(running) < most and (not running or rng.random() < 0.8):
            prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 20)).tolist()
            running.append(Request(number, prompt, SamplingParams(), 0))
        if len(running) > 1 and rng.random() < 0.3:
            free.extend(running.pop(int(rng.integers(len(running)))).block_table)
        rows = []
        for request in running:
            start = request.num_tokens - 1 if only_decodes else request.num_computed_tokens
            left = request.num_tokens - start
            count = int(rng.integers(1, left + 1))
            while len(request.block_table) * BLOCK_SIZE < start + count:
                request.block_table.append(int(free.pop()))
            is_decode = only_decodes or start >= request.num_prompt_tokens
            phase = Phase.DECODE if is_decode else Phase.PREFILL
            rows.append(ScheduledRow(request, phase, start, count, count == left))
        yield rows


def replayed_steps(
    graphs: StepGraphs,
    each_step: Iterable[list[ScheduledRow]],
    eager: Callable[[InputBatch], torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The logits of each step, replayed and by `eager`."""
    tables, again = BlockTables(), BlockTables()
    tokens: dict[int, int] = {}  # known only on the device: rows of the step begin with them
    for rows in each_step:
        batch = input_batch.build(rows, tables, BLOCK_SIZE)
        for row in rows:
            if row.request.request_id in tokens:
                assert row.request.token_ids.pop() == tokens[row.request.request_id]
        unknown = input_batch.build(rows, again, BLOCK_SIZE, ahead=True)
        fed_at = list(unknown.fed_at)
        assert [tokens[name] for name in unknown.fed_by] == batch.input_ids[fed_at].tolist()
        assert not unknown.input_ids[fed_at].any()
        size = graphs.size_for(unknown)
        assert size == next(each for each in graphs.sizes if each >= len(batch.input_ids))
        fed = torch.tensor([tokens[name] for name in unknown.fed_by], dtype=torch.int64)
        graphs.buffers.fill(unknown, size, fed if len(fed) else None)
        found = graphs.run(size, len(batch.logits_of), paged(unknown))
        yield found, eager(batch)
        for row in rows:
            if row.request.request_id in tokens:
                row.request.token_ids.append(tokens.pop(row.request.request_id))
            row.request.num_computed_tokens += row.num_tokens
        for i, place in enumerate(batch.sampling_rows):
            request = rows[place].request
            tokens[request.request_id] = int(found[i].abs().sum()) % VOCAB_SIZE
            request.token_ids.append(tokens[request.request_id])


def eager(model: Model, batch: InputBatch) -> torch.Tensor:
    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(array))

    inputs = StepInputs(
        tensor(batch.input_ids), tensor(batch.positions), tensor(batch.logits_of), paged(batch)
    )
    return model.forward(inputs, ReferenceAttention())


def paged(batch: InputBatch) -> PagedBatch:
    return PagedBatch(
        query_starts=batch.query_starts,
        context_lens=batch.context_lens,
        block_tables=batch.block_tables,
        slot_mapping=torch.from_numpy(np.array(batch.slot_mapping)),
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
    )


def recorded(model: Model, sizes: list[int]) -> StepGraphs:
    cpu = torch.device("cpu")
    graphs = StepGraphs(
        sizes,
        model.forward,
        ReferenceAttention(),
        TokenBuffers(sizes[-1], BLOCK_SIZE, SCRATCH_SLOT, cpu),
        torch.zeros(MOST_LOGITS, VOCAB_SIZE, dtype=torch.float64),
        RelaunchingDevice(),
    )
    graphs.record(lambda what, share: None)
    return graphs


@settings(max_examples=12)
@given(st.integers(0, 2**32))
def test_replayed_pieces_give_the_logits_and_keys_of_an_ordinary_step(seed: int) -> None:
    plain, replayed = Model(), Model()
    graphs = recorded(replayed, [4, 16, 64])
    each_step = steps(np.random.default_rng(seed), 20)
    for found, expected in replayed_steps(graphs, each_step, lambda batch: eager(plain, batch)):
        torch.testing.assert_close(found, expected)
        for ours, theirs in zip(replayed.caches, plain.caches, strict=True):
            torch.testing.assert_close(ours.keys[:NUM_BLOCKS], theirs.keys[:NUM_BLOCKS])
            torch.testing.assert_close(ours.values[:NUM_BLOCKS], theirs.values[:NUM_BLOCKS])


def test_a_step_with_more_tokens_or_logits_than_any_graph_has_none() -> None:
    graphs = recorded(Model(), [4, 16])
    batch = input_batch.build(next(steps(np.random.default_rng(1), 1)), BlockTables(), BLOCK_SIZE)
    assert graphs.size_for(batch._replace(input_ids=np.zeros(16, dtype=np.int64))) == 16
    assert graphs.size_for(batch._replace(input_ids=np.zeros(17, dtype=np.int64))) is None
    assert graphs.size_for(batch._replace(logits_of=np.zeros(4, dtype=np.int64))) is None


def test_recorded_sizes_grow_up_to_the_largest_step_that_may_come() -> None:
    assert piece_sizes(4) == [4]
    assert piece_sizes(100) == [64, 100]
    assert piece_sizes(700) == [*range(64, 513, 64), 640, 700]
    assert piece_sizes(60_000)[-1] == LARGEST_STEP
