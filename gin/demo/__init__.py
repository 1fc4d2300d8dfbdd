"""Gin files of the embedded demo."""
