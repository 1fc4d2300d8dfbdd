"""Runs of either stack as jobs on Vertex AI."""
