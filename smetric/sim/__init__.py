"""Models of an engine and its cache without a clock of their own: simulator and emulator run the same ones."""
