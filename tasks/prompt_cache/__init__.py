"""The prompt cache: writes SeqIO's on-disk format on one machine, without SeqIO or TensorFlow.

plan.py        which tasks and splits are left to cache, as plain data
records.py     renderings -> examples of a task and of its `_score_eval` twin -> TFRecord files,
               without TensorFlow; SeqIO reads them from buckets
shards.py      a worker's part: spooling rows, writing one piece of a split; workers of Beam
cache.py       a run: workers, progress, and finishing tasks
folders.py     locking, staging, checks of caches, and where a cached task came from
seqio_plan.py  the list of work for seqio_cache_tasks
"""
