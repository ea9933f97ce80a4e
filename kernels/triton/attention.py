"""Paged attention in Triton for a GPU: decodes, prefill chunks and any mixture of them.

Long contexts are split among programs, whose results are merged by their weights (Flash-Decoding;
Dao et al., 2023). Into how many parts depends on the amount of work (`num_splits`), never on a
batch size. The kernel itself is in `attend.py`.

A kernel reads the layout of a step from device tensors (`PagedBatch.on_device`), and a program
without work ends at once. So a launch captured in a CUDA graph stays correct when the content of
these tensors changes.

Shapes: queries and output `[num_tokens, num_heads, head_dim]`, caches
`[num_blocks, block_size, num_kv_heads, head_dim]`. All have one dtype, except that the caches may
have a smaller one. Any head_dim up to 256, any group and block size.
"""

import torch

from stepscope.kernels.paged_attention import PagedBatch
from stepscope.kernels.triton.attend import attend
from stepscope.kernels.triton.plan import Device, plan_launches


class TritonAttention:
    """`AttentionBackend` in Triton, as the module describes."""

    name = "triton"
    is_capturable = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
            raise ValueError("the KV cache of a layer must be contiguous")
        if query.stride(2) != 1:
            query = query.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        tensors = batch.on_device()
        key = (self.name, sliding_window, query.shape[1:], query.dtype, key_cache.shape)
        launches = batch.plans.get(key)
        if not isinstance(launches, list):  # planned by the first call, from the arrays on the host
            launches = batch.plans[key] = plan_launches(
                batch,
                sliding_window,
                num_heads=query.shape[1],
                num_kv_heads=key_cache.shape[2],
                head_dim=query.shape[2],
                itemsize=query.dtype.itemsize,
                device=self._device,
            )
        for launch in launches:
            attend(
                launch, query, key_cache, value_cache, output, tensors, scale, sliding_window,
                softcap, sinks, upcast=self._device.is_interpreted,
            )  # fmt: skip
        return output
