"""From token ids to token ids: scheduler, KV cache, runner. No text, no files."""
