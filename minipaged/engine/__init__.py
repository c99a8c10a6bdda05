"""The engine: requests, the scheduler that decides each step, sampling, and the `LLM` front end."""
