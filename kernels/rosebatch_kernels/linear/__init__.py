"""The matrix product with a weight, which is plain, or re-laid once for the device."""
