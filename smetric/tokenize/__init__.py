"""Token ids of prompts, equal to those their engine works on: by the engine's own `/tokenize`, or locally."""
