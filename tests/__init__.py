"""Tests by topic: a folder per package, and one for the laws. Those of a GPU are marked `gpu`."""
