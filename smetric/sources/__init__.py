"""Sources of knowledge about instances: load, caches, token ids. Their protocols are in `source.py`."""
