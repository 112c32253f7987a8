"""Matrix products in fp8 (e4m3): the weight as its checkpoint has it, the input quantized row by row."""
