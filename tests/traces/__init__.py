"""Tests of traces: readers, import rules, arrivals and stored tables."""
