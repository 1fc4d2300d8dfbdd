"""The name of T0's own package, so that commands and modules that say `t0.seqio_tasks` work.

setup.py installs this folder as `t0`, unless T0's package itself is installed.
"""
