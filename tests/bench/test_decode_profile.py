"""The subjects of a profile. Profiling needs a GPU; ``test_attribution`` tests how a trace is read."""

import sys

import pytest

from rosebatch.bench.scripts.decode_profile import Subject, main


def test_subjects():
    """With or without the word for sampling."""
    assert Subject.parse("gpt2:float16:256:550") == Subject("gpt2", "float16", 256, 550, False)
    assert Subject.parse("gpt2:float16:256:550:sampled") == Subject("gpt2", "float16", 256, 550, True)


@pytest.mark.parametrize("text", ["gpt2:float16:256", "gpt2:float16:many:550", "gpt2:float16:256:550:sample"])
def test_what_is_no_subject(monkeypatch, capsys, text):
    """argparse hides the message of a ValueError: nobody learned the right form."""
    monkeypatch.setattr(sys, "argv", ["decode_profile", text])
    with pytest.raises(SystemExit):
        main()
    assert f"'{text}' does not have the form MODEL:DTYPE:SEQUENCES:TOKENS[:sampled]" in capsys.readouterr().err
