"""From the body and the headers of a request to what routing needs of it; `reader.py` does it all."""
