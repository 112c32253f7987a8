"""What LoRA adapters add to a product, each row its own."""
