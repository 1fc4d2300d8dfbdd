"""The modes of a run on the JAX stack, one small module each; `run` picks one."""
