"""What computes the prompts of an ``LLM``: an engine in this process, or worker processes."""
