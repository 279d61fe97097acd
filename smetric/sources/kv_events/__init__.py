"""KV events: the exact source of hit_len."""
