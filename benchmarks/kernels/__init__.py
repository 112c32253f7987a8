"""Times of single kernels at the sizes of models, on a GPU."""
