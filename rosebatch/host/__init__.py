"""What surrounds rosebatch: paths, states of files, threads, and the files of models, which may hold anything."""
