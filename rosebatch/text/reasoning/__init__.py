"""How models write what they think before they answer: a form a file."""
