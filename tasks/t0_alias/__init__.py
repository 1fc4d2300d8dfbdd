"""The name of T0's own package, for commands and modules that use `t0.seqio_tasks`.

setup.py installs this folder as `t0`, unless T0's package itself is installed.
"""
