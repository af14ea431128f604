"""Tests of analysis: metrics, comparisons, reports and their figures."""
