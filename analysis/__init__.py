"""Reads run folders: metrics, comparison of a prediction with a measurement, figures and reports.

ab/ compares runs that differ in a setting, figures/ draws, pages/ writes HTML reports; the modules
here compute, and know none of them. May import engine.results.schema, and nothing else of ours:
results of any backend are read as files.
"""
