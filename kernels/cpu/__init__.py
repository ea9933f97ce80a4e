"""C++ kernels for CPUs, in one library for each instruction set level, and their Python wrappers.

May import: kernels.
A new kernel gets a function in a `.cpp` file, its structure in `library.py`, and a wrapper here.
"""
