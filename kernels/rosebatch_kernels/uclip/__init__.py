"""UClipNorm: a clip of scaled channels in place of a norm, without any reduction (source: article S4)."""
