"""Sends a run's metrics and files to the experiment trackers that people already use.

A tracker follows the run's folder: whatever stack trains, its metrics are lines of metrics.jsonl.
`following` passes each line on once, also over restarts.
"""
