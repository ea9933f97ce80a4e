"""C++ kernels for CPUs and their Python wrappers. Each CPU level (AVX2, ...) has its own library.

May import: kernels.
A new kernel gets a function in a `.cpp` file, its structure in `library.py`, and a wrapper here.
"""
