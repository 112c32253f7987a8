"""GGUF files, converted to folders of transformers when they are first used."""
