"""Files as transformers writes them: config.json and generation_config.json, read and made."""
