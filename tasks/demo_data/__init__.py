"""The embedded demo: rows in the schemas of real datasets, all generated, and their vocabulary."""
