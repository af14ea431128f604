"""Tests of benchmarks: how claims are judged and kept, not the claims themselves."""
