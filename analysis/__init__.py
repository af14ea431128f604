"""Reads run folders: metrics, comparison of a prediction with a measurement, figures and reports.

figures/ draws, pages/ writes HTML reports; the modules here compute. May import, of Tandem, only
engine.results.schema: results of any backend are read as files.
"""
