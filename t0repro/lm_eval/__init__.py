"""T0's prompts in lm-evaluation-harness, our models in it, and its results in our reports."""
