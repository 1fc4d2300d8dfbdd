"""Settings: RunConfig, and the gin dialects that produce it."""
