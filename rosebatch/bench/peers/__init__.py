"""Other engines on the same token ids. Each module runs in its own process, in its engine's environment.

Nothing here imports rosebatch outside this package.
"""
