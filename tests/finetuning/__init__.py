"""Tests of finetuning in windows: gradients beside plain torch, memory, and whole runs."""
