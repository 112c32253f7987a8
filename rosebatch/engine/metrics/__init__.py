"""What the engine did and how close it came to the least time."""
