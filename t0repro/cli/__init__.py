"""Commands: one module each, which reads flags and calls one function."""
