"""HP1 attention: gated by a short filter over the scores, without softmax (source: article S4)."""
