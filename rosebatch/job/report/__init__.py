"""What a run did and how fast."""
