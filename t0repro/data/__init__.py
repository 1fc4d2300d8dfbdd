"""The batches of a run."""
