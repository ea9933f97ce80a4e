"""Tries whether a backend computes correct results on this device, before an engine uses it.

A check of versions would not be enough: a kernel may lack a compiler, be built for another torch,
or align its mask at the wrong end. A step of a few tokens finds all of this.
"""

import numpy as np
import torch

from stepscope.kernels.paged_attention import AttentionBackend, PagedBatch
from stepscope.kernels.reference import ReferenceAttention

# (tokens before the step, tokens in it): decodes, a whole prompt, a later chunk.
LENGTHS = ((40, 1), (0, 24), (19, 13), (3, 1))
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16
# Largest error that rounding to half precision may cause on values of about 1.
TOLERANCE = 0.03


def failure(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Compare `backend` with the reference; return in one line what differs, or None."""
    try:
        for window in (None, 7):
            error = _error(backend, device, dtype, window)
            if not error <= TOLERANCE:
                return f"its results are wrong here (off by {error:.2g} in a trial)"
    except Exception as error:  # noqa: BLE001 - a compiler or a driver may raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"it fails in a trial: {lines[0][:200]}"
    return None


def _error(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, window: int | None
) -> float:
    counts = np.array([new for _, new in LENGTHS])
    contexts = np.array([before + new for before, new in LENGTHS])
    width = -(-int(contexts.max()) // BLOCK_SIZE)
    num_tokens = int(counts.sum())
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=generator)
    caches = torch.randn(
        2, len(LENGTHS) * width, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, generator=generator
    )
    query, caches = query.to(device, dtype), caches.to(device, dtype)
    batch = PagedBatch(
        query_starts=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=contexts,
        block_tables=np.arange(len(LENGTHS) * width).reshape(-1, len(LENGTHS)).T.copy(),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        block_size=BLOCK_SIZE,
        device=device,
    )
    scale = HEAD_DIM**-0.5
    with torch.inference_mode():
        found = backend(query, caches[0], caches[1], batch, scale=scale, sliding_window=window)
        expected = ReferenceAttention()(
            query, caches[0], caches[1], batch, scale=scale, sliding_window=window
        )
        return float((found.float() - expected.float()).abs().max())
