"""Checkpoints of any format, read and written around one table of names and layouts.

`layout` has the table; `mtf`, `jax_tree` (with `orbax_dir`, `t5x_msgpack` and `scanning`) and `hf`
read and write a format each, in T5X's flat keys; `sources` finds and opens what a path means;
`plans` and `staging` say what a conversion writes and where until it is whole; `convert`,
`compare`, `inspection` and `verification` work on whatever is open.
"""
