"""From token ids to token ids: scheduler, KV cache, runner. Knows nothing of text or files."""
