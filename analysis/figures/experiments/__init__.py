"""Figures of the training experiments in conf/experiment: a module for each, named after it.

May import the modules of analysis, analysis.figures and engine.results.schema.
"""
