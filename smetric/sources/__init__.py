"""What knows something about instances: each module is one source, behind the protocol of `source.py`."""
