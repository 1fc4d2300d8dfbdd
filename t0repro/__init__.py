"""t0repro: the T0 recipe on Mesh TensorFlow and on JAX, from the same gin parameters."""

__version__ = "0.1.0"
