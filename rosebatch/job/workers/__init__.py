"""A job over several processes: a parent without PyTorch reads and writes, a child for each device serves rows."""
