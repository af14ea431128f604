"""Tests of the Triton kernels on Triton's interpreter, run by `make kernels`."""
