"""Chooses the kernel for a call: attention, products with weights, and what lies between them.

May import: kernels, kernels.cpu, kernels.triton.
A new backend gets an entry in `backends.py`, a new small operation a function in `fused.py`.
"""
