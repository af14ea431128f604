"""Tests of tandem: verbs, configurations, sweeps, and the messages of mistakes."""
