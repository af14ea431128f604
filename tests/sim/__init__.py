"""Tests of sim: cost models, fitting, devices, and foreign profiles."""
