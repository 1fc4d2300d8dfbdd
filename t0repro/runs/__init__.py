"""The modes of a run on the JAX stack, in small modules; `run.run` calls the right one."""
