"""Triton kernels for GPUs, each beside the function that launches it.

May import: kernels.
A new kernel gets a case in `tests/compute/triton_worker.py`; `plan.py` chooses the
tiles (`BLOCK_SIZE` in a kernel is that of the KV cache).
"""
