"""SMetric: a sidecar that routes LLM requests to vLLM instances by a policy file and says why."""

__version__ = "0.1.0"
