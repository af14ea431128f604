"""Tests of planners that search: layouts, models of a step, and what they choose."""
