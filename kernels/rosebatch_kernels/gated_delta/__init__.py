"""The gated delta rule of linear-attention layers: a short convolution, the rule, a gated norm."""
