"""T5 in Flax."""
