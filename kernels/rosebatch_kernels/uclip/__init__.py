"""UClipNorm: a clip of scaled channels in the place of a norm, without any reduction (source: article S4)."""
