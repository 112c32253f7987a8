"""From settings to a running engine, in one process or in tensor-parallel ranks."""
