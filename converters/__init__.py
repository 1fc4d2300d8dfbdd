"""Checkpoints of any format, read and written around one table of names and layouts.

`layout` has the table; `mtf` and `jax_tree` read and write a format each, in T5X's flat keys;
`sources` finds and opens what a path means, `convert`, `compare` and `inspection` work on whatever
is open.
"""
