"""Scoring: pairs, grouping, the engine, its journal, rank metrics and generation."""
