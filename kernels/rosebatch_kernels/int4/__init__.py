"""The matrix product with a weight of 4-bit integers, which stay 4-bit in memory."""
