"""Kernels in Triton for GPUs, one a file, with their launches.

May import: kernels.
A kernel gets a file here, a case in `tests/compute/triton_worker.py`; tiles are in `plan.py`.
"""
