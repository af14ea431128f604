"""Figures as SVG with the numbers behind them as CSV: of one run, of a comparison, of a sweep.

May import the modules of analysis, analysis.ab and engine.results.schema; matplotlib is
imported only where a figure is drawn.
"""
