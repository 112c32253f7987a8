"""LoRA adapters: what PEFT saves of a model that it trained."""
