"""Runs that differ in a setting: groups, differences with intervals, and both in words.

May import the modules of analysis and engine.results.schema.
"""
