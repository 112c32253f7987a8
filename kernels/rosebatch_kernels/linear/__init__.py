"""The matrix product with a weight, plain or re-laid once for the device."""
