"""Attention in plain PyTorch, and by the flash-attn package where it is installed.

May import: kernels.
A backend without kernels of ours goes here.
"""
