"""CUDA kernels, compiled when they are first called: by CuPy for a GPU, or by g++ for the emulator of this package.

A `.cu` file holds the kernels, the `.py` file beside it their host code, which is one and the same for NumPy and CuPy arrays.
"""
