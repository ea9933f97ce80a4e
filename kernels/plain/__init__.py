"""Attention in plain PyTorch, and by the flash-attn package if it is installed.

May import: kernels.
A new backend without our own kernels goes here.
"""
