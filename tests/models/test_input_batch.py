"""The model gets exactly the scheduled inputs, whatever happened to a request's blocks before."""

import random

import numpy as np
import pytest

from stepscope.engine.execution import input_batch
from stepscope.engine.execution.input_batch import BlockTables
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow

BLOCK_SIZE = 4


def new_request(request_id: int, num_tokens: int) -> Request:
    token_ids = [1000 * request_id + i for i in range(num_tokens)]
    return Request(request_id, token_ids, SamplingParams(), arrival_ns=0)


def row(request: Request, start: int, num_tokens: int) -> ScheduledRow:
    samples = start + num_tokens == request.num_tokens
    return ScheduledRow(request, Phase.PREFILL, start, num_tokens, samples)


def test_input_rows_are_laid_out_one_after_the_other() -> None:
    one, two, three = new_request(1, 9), new_request(2, 6), new_request(3, 5)
    one.block_table, two.block_table, three.block_table = [7, 3, 5], [2, 9], [4, 0]
    rows = [row(one, 3, 4), row(two, 5, 1), row(three, 0, 5)]
    batch = input_batch.build(rows, BlockTables(), BLOCK_SIZE)
    assert batch.input_ids.tolist() == [1003, 1004, 1005, 1006, 2005, 3000, 3001, 3002, 3003, 3004]
    assert batch.positions.tolist() == [3, 4, 5, 6, 5, 0, 1, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [31, 12, 13, 14, 37, 16, 17, 18, 19, 0]
    assert batch.query_starts.tolist() == [0, 4, 5, 10]
    assert batch.context_lens.tolist() == [7, 6, 5]
    assert batch.block_tables[0].tolist() == [7, 3, 5]
    assert batch.block_tables[1, :2].tolist() == [2, 9]
    assert batch.sampling_rows == [1, 2]
    assert batch.logits_of.tolist() == [4, 9]


@pytest.mark.parametrize("seed", range(5))
def test_block_tables_follow_requests_that_grow_end_or_are_preempted(seed: int) -> None:
    rng = random.Random(seed)
    tables = BlockTables()
    live: dict[int, Request] = {}
    next_id = 0
    for _ in range(200):
        for _ in range(rng.choice([0, 1, 30])):
            live[next_id] = new_request(next_id, 1)
            next_id += 1
        for request_id in rng.sample(sorted(live), k=len(live) // 3):
            if rng.random() < 0.3:
                del live[request_id]
            elif rng.random() < 0.3:  # preempted, and admitted with other blocks
                live[request_id].block_table = [rng.randrange(999) for _ in range(3)]
            else:
                live[request_id].block_table += [
                    rng.randrange(999) for _ in range(rng.randrange(9))
                ]
        chosen = [request for request in live.values() if request.block_table]
        rng.shuffle(chosen)
        if not chosen:
            continue
        gathered = tables.gather(chosen)
        assert gathered.shape == (len(chosen), max(len(r.block_table) for r in chosen))
        for line, request in zip(gathered, chosen, strict=True):
            assert line[: len(request.block_table)].tolist() == request.block_table
        # Past a request's end the table may hold any block.
        assert np.all((gathered >= 0) & (gathered < 999))
