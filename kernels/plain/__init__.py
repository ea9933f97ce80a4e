"""Attention backends without kernels of our own: plain PyTorch, and installed FlashAttention.

May import: kernels.
A new backend without our own kernels goes here.
"""
