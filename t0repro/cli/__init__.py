"""The commands, one module each: a module reads flags and calls one function."""
