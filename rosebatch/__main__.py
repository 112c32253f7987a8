"""``python -m rosebatch`` and the installed ``rosebatch`` script."""

import os

try:
    from rosebatch.cli.early_signals import end_at_once
except KeyboardInterrupt:
    # Python's own handler is still there, and its traceback would be printed.
    os._exit(130)


def run() -> None:
    """Run the command line as a process."""
    end_at_once()
    # Only now: a signal would break an import.
    from rosebatch.host.bytecode import keep_bytecode
    from rosebatch.host.garbage import search_seldom

    search_seldom()
    # Before the command line is imported: its bytecode is kept too.
    keep_bytecode()
    from rosebatch.cli.app import run

    run()


if __name__ == "__main__":
    run()
