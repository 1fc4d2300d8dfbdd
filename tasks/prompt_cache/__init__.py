"""The prompt cache: writes SeqIO's on-disk format on one machine, without SeqIO or TensorFlow.

plan.py        the work of a run, as plain data
planning.py    decides which tasks and splits are left to cache
spool.py       rows on disk, looked up by number
prompts.py     rows -> examples of a task and of its `_score_eval` twin
tokens.py      text -> tokens, as SeqIO's vocabulary does it
records.py     examples -> TFRecord files, without TensorFlow
streaming.py   SeqIO reads a cache in a bucket
shards.py      a worker's part: spooling rows, and writing one piece of a split
cache.py       a run: workers, progress, and finishing tasks
folders.py     locking, staging, and moving a task into place
integrity.py   checks caches before they are used
provenance.py  where a cached task came from
seqio_plan.py  the list of work for seqio_cache_tasks
"""
