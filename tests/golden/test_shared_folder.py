"""What forks share is made once, and whole."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.shared_folder import make_once


def test_what_failed_is_made_anew(tmp_path):
    """Weights without their references would have been everyone's."""

    def fail(folder):
        (folder / "half").touch()
        raise ValueError

    with pytest.raises(ValueError):
        make_once(tmp_path / "golden", fail)
    assert not (tmp_path / "golden").exists()
    made = make_once(tmp_path / "golden", lambda folder: (folder / "whole").touch())
    assert [each.name for each in made.iterdir()] == ["whole"]
    assert make_once(tmp_path / "golden", fail) == made


def test_one_of_many_makes_it(tmp_path):
    """Each of the forks made its own."""
    made = []
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: make_once(tmp_path / "golden", made.append), range(8)))
    assert set(found) == {tmp_path / "golden"}
    assert len(made) == 1
