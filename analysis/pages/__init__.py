"""HTML reports of a run, a comparison or a sweep: cells, tables and pages.

May import the modules of analysis, analysis.ab, analysis.figures, analysis.figures.experiments and
engine.results.schema.
"""
