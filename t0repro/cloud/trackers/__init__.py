"""Experiment trackers: Weights & Biases, MLflow, TensorBoard."""
