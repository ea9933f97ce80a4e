"""Kernels in C++ for CPUs, one library for each level of instructions, with their Python fronts.

May import: kernels.
A kernel is a function in a `.cpp` file, its structure in `library.py`, and a front beside it.
"""
