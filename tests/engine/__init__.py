"""Tests of engine: ledger, plan checks, progress and replicas, piece by piece."""
