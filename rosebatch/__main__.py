"""``python -m rosebatch``: the same command as the installed ``rosebatch`` script."""

from rosebatch.cli import main

if __name__ == "__main__":
    main()
