"""``python -m rosebatch``: the same command as the installed ``rosebatch`` script."""

from rosebatch.cli.app import run

if __name__ == "__main__":
    run()
