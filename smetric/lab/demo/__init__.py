"""`smetric demo`: recorded agent sessions through a real router over emulated engines."""
