"""Runs on the JAX stack: a module for each mode, which `run.run` dispatches to, and rank-eval."""
