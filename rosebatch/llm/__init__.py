"""The Python library: ``LLM``, its outputs and backends, and the class for Ray Data."""
