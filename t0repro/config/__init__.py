"""Settings: RunConfig, and the gin dialects that it is read from."""
