"""`smetric demo`: recorded agent sessions driven through a real router over emulated engines, and what came of it."""
