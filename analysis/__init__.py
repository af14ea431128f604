"""Reads run folders: metrics, comparison of a prediction with a measurement, figures and reports.

figures/ draws, pages/ writes HTML reports; the modules here compute, and know neither. May import
engine.results.schema, and nothing else of ours: results of any backend are read as files.
"""
