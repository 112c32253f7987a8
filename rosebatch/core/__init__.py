"""Types and errors that all packages share; it imports none of them."""
