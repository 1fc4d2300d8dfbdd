"""What runs on the JAX stack: the modes of a run, which `run.run` tells apart, and rank-eval."""
