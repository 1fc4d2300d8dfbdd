"""What a RunConfig is run by on JAX: one module for each mode."""
