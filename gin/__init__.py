"""Gin files: models, recipes and the demo, found by --gin_location_prefix."""
