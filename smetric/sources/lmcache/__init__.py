"""LMCache lookup services as sources."""
