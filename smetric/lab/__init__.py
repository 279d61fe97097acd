"""Laboratory: engine model, emulator, traces and demo; nothing that serves imports it."""
