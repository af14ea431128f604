"""Hydra groups, one yaml per choice. A package so that pkg://conf finds them when installed."""
