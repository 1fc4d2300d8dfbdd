"""Optimizer, train step, trainer and checkpoints of the JAX stack."""
