"""What commands do that import JAX, apart from their options so that --help stays fast."""
