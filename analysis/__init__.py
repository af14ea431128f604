"""Reads run folders and nothing else: metrics, comparison, plots, report."""
