"""Prefix index: the embedded default source of hit_len."""
