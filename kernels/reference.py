"""Reference implementation of paged attention: easy to read, request by request, in fp32.

Every other backend is tested against this one. It is not meant to be fast.
"""

import torch

from stepscope.kernels.paged_attention import AttentionOptions, LayerCache, PagedBatch


class ReferenceAttention:
    """Plain softmax attention, one request and one full score matrix at a time."""

    name = "reference"
    is_capturable = False

    def __call__(
        self, query: torch.Tensor, cache: LayerCache, batch: PagedBatch, options: AttentionOptions
    ) -> torch.Tensor:
        scale, sliding_window, softcap, sinks = options
        outputs = []
        for r in range(len(batch.context_lens)):
            first, last = int(batch.query_starts[r]), int(batch.query_starts[r + 1])
            context_len = int(batch.context_lens[r])
            group = query.shape[1] // cache.keys.shape[2]
            keys, values = (
                _gather(each, batch, r, context_len).repeat_interleave(group, dim=1)
                for each in (cache.keys, cache.values)
            )
            scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            k_pos = torch.arange(context_len, device=query.device)
            q_pos = k_pos[context_len - (last - first) :, None]
            visible = k_pos <= q_pos
            if sliding_window is not None:
                visible &= k_pos > q_pos - sliding_window
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                column = sinks.float().view(-1, 1, 1).expand(-1, last - first, 1)
                scores = torch.cat([scores, column], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., :context_len]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outputs).to(query.dtype)


def _gather(cache: torch.Tensor, batch: PagedBatch, r: int, context_len: int) -> torch.Tensor:
    """Return the keys or values of request `r` in order: [context_len, num_kv_heads, head_dim]."""
    num_blocks = -(-context_len // batch.block_size)
    pages = [cache[int(block)].float() for block in batch.block_tables[r, :num_blocks]]
    return torch.cat(pages)[:context_len]
