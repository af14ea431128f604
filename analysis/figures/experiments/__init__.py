"""Figures of the training experiments in conf/experiment: a module for each, named after it.

May import analysis and engine.results.schema.
"""
