"""The prompt cache: SeqIO's on-disk format, written by a path of our own for one machine.

plan.py      what a run has to do, as plain data
planning.py  which tasks and splits are left to cache
spool.py     rows on disk, each found by its number
prompts.py   rows -> examples of a task and of its `_score_eval` twin
tokens.py    text -> tokens, as SeqIO's vocabulary
records.py   examples -> TFRecord files, without TensorFlow
shards.py    the worker's part: one piece of a split
cache.py     workers, progress, and what is written last
folders.py   staging, locking, and putting a task in place
"""
