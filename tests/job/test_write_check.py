"""Whether a file can be made is tried before a run, and the trial leaves nothing."""

import os
import signal

import pytest

from rosebatch.core.errors import UserError
from rosebatch.io.files import require_writable_url
from rosebatch.job.paths import require_creatable
from tests.helpers.forks import FORKS


def killed(function, *args):
    """Call a function in a process that dies where it would delete a file."""

    def die(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    os.unlink = os.remove = die
    function(*args)


@pytest.mark.parametrize("check", ["file", "url"])
def test_a_killed_trial_is_cleaned_up(tmp_path, check):
    """A random name stayed for ever."""
    path = tmp_path / "out.jsonl.part"
    args = (require_creatable, path, "out") if check == "file" else (require_writable_url, f"local://{path}")
    job = FORKS.Process(target=killed, args=args)
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    args[0](*args[1:])
    assert not list(tmp_path.iterdir())


def test_a_file_of_that_name_stays(tmp_path):
    """Only an empty one can be of an earlier trial."""
    (tmp_path / "out.jsonl.~try").write_text("mine")
    require_creatable(tmp_path / "out.jsonl.part", "out")
    assert (tmp_path / "out.jsonl.~try").read_text() == "mine"
    with pytest.raises(UserError, match=r"out: the folder .*missing is missing: mkdir -p "):
        require_creatable(tmp_path / "missing" / "out.jsonl.part", "out")
