"""Which device holds and computes which part of a run, on one device or on many."""
