"""The batches of a run, and the cache of prompted tasks that they come from."""
