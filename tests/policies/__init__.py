"""Tests of policies: what each decides, and against the systems that they follow."""
