"""Rank classification of a score evaluation's outputs, comparisons of two runs, and the report."""
