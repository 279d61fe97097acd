"""Telemetry: spans, metrics, logs and the last decisions. It decides nothing and moves no bytes."""
