"""Tests of training through the whole engine: numerics, memory, time and refusals."""
