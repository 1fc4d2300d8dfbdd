"""Reads and writes checkpoints of every format through one table of names and layouts.

`parameters.naming` has the table. `mtf`, `jax_tree` (with `orbax_dir` and `t5x_msgpack`) and `hf`
each read and write one format, in T5X's flat keys. `sources` finds and opens the checkpoint at a
path. `conversion` decides what a conversion writes, and `staging` holds it until it is complete.
`convert` and `inspection` work on any open checkpoint.
"""
