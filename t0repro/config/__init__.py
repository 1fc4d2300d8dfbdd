"""Settings: The runs of each mode, and the gin dialects that produce them."""
