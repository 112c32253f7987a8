"""Images of models that see: what is cut into patches, and the towers that make vectors of these; a file a family."""
