"""HTML reports of a run, a comparison or a sweep: cells, tables and pages.

May import analysis and engine.results.schema.
"""
