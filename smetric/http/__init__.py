"""HTTP/1.1 on both sides: no policy, no LLM."""
