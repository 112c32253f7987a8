"""What to profile. The profile itself needs a GPU; how a trace is read, ``test_attribution`` tests."""

import pytest

from rosebatch.bench.scripts.decode_profile import Subject


def test_subjects():
    """What follows the tokens is one word, or the mistake would be profiled as greedy."""
    assert Subject.parse("gpt2:float16:256:550:sampled") == Subject("gpt2", "float16", 256, 550, True)
    with pytest.raises(ValueError, match="sampled"):
        Subject.parse("gpt2:float16:256:550:sample")
