"""Other engines on the same token ids. Each module runs in a process of its own, in the environment of its engine:
nothing here imports more of rosebatch than this package.
"""
