"""Writing into the paged KV cache: new tokens, and whole blocks for copy-on-write."""
