"""Decisions and traffic written to files, read back and evaluated again."""
