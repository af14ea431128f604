"""HTML reports of a run, a comparison or a sweep: cells, tables and pages.

May import the modules of analysis, analysis.figures, analysis.figures.experiments and
engine.results.schema.
"""
