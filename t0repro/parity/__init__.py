"""Proof that the two stacks compute the same thing: both run on one job, and what they compute."""
