"""transformers' config.json of each family -> fields of ``ModelConfig``. ``rosebatch.model.hf_config`` picks one."""
