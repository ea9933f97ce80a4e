"""Says how a prompt fared in the prefix cache: what was hit, and why the rest was not."""

from collections.abc import Callable

from stepscope.engine.protocol.wire import PrefixMisses, RequestView
from stepscope.recordings.state.session import request_name


def parts_of(view: RequestView, misses: PrefixMisses) -> dict[str, int]:
    """Return how many tokens of the prompt are of which kind."""
    hit, evicted, diverged = view.num_cached_tokens, misses.num_evicted, misses.num_diverged
    new = view.num_prompt_tokens - hit - evicted - diverged
    return {"hit": hit, "evicted": evicted, "diverged": diverged, "new": new}


def texts(view: RequestView, block_size: int | None, clock: Callable[[int], str]) -> list[str]:
    """Return one or two texts; none if it is not known.

    Args:
        clock: returns an engine time as text.
    """
    if (misses := view.misses) is None:
        return []
    counts = ", ".join(f"{number:,} {name}" for name, number in parts_of(view, misses).items())
    larger = ""
    if misses.num_evicted:
        half, twice = misses.num_more_hits_1_5x, misses.num_more_hits_2x
        larger = f"; a pool 1.5x as large would have hit {half:,} more, 2x {twice:,}"
    said = [f"prompt of {view.num_prompt_tokens:,} tokens: {counts}{larger}"]
    why = []
    if misses.evicted_ns is not None and misses.evicted_by is not None:
        seconds = (misses.life_ns or 0) / 1e9
        why.append(
            f"evicted at {clock(misses.evicted_ns)} by {request_name(misses.evicted_by)}, "
            f"after {seconds:,.1f} s in the cache"
        )
    if misses.diverged_from is not None:
        first = view.num_prompt_tokens - misses.num_diverged
        block = f" (block {first // block_size + 1:,})" if block_size else ""
        other = request_name(misses.diverged_from)
        why.append(f"diverged from {other} at token {first + 1:,}{block}")
    if why:
        said.append("; ".join(why))
    return said
