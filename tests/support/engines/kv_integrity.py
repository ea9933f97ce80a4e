"""Checks the books of a KV cache against each other: a contradiction is a bug."""

from collections.abc import Iterator
from itertools import chain

from stepscope.engine.scheduling.block_pool import BlockPool
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request


def check_integrity(kv: KVCacheManager) -> None:
    """Check the state of all blocks, all counts and all block tables against each other."""
    holders = list(kv._holders.values())
    for problem in _problems_of_blocks(kv._pool, holders):
        raise AssertionError(problem)
    assert sum(len(request.block_table) for request in holders) == kv.num_held
    assert sum(map(kv.num_blocks_in_all, holders)) == kv._num_promised
    for request in holders:
        _check_table(kv, request)


def _check_table(kv: KVCacheManager, request: Request) -> None:
    who, table = f"request {request.request_id}", request.block_table
    if len(table) * kv.block_size < request.num_computed_tokens:
        raise AssertionError(
            f"{who}: {request.num_computed_tokens} tokens computed, {len(table)} blocks held"
        )
    for index in range(request.num_hashed_blocks):
        digest = kv._pool._digests[table[index]]
        if digest is not None and digest != kv.digest(request, index):
            raise AssertionError(f"{who}: block {table[index]} is known by another's content")


def _problems_of_blocks(pool: BlockPool, holders: list[Request]) -> Iterator[str]:
    ref_counts = [0] * pool.num_blocks
    owned: set[int] = set()
    for request in holders:
        blocks = request.block_table
        if len(set(blocks)) != len(blocks):
            yield f"request {request.request_id} holds a block twice: {blocks}"
        for block in blocks:
            ref_counts[block] += 1
            if pool._owners[block] == request.request_id:
                owned.add(block)
    empty, cached, digests = set(pool.empty), pool.cached, pool._digests
    if len(empty) != len(pool.empty):
        yield "a block is twice among the empty ones"
    by_digest, copies = pool._by_digest, pool._copies
    for block, expected in enumerate(ref_counts):
        digest = digests[block]
        places = (block in empty, block in cached, expected > 0)
        if pool._ref_counts[block] != expected:
            yield f"block {block}: {expected} holders, {pool._ref_counts[block]} counted"
        if expected and block not in owned:
            yield f"block {block}: owner {pool._owners[block]} does not hold it"
        if sum(places) != 1:
            yield f"block {block}: empty, cached, held are {places}, expected one of them"
        if not expected and (digest is None) != places[0]:
            yield f"block {block}: free with content {digest!r} in the wrong list"
        if digest is not None and block not in (by_digest.get(digest), *copies.get(digest, ())):
            yield f"block {block}: its content cannot be found"
    further = ((digest, block) for digest, each in copies.items() for block in each)
    for digest, block in chain(by_digest.items(), further):
        if digests[block] != digest:
            yield f"block {block}: found by content that it does not hold"
