"""Tests of models: parameters, operators and workspace, against torch and transformers."""
