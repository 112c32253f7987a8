"""How models write tool calls: a form a file."""
