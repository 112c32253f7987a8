"""Ctrl-C at a chosen moment: where Python would raise it in code of ours."""

import dis
import sys
from contextlib import contextmanager

# Python looks for signals after a call, at the begin of a function, and where a loop goes on.
_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")


class Interrupt:
    """Raises KeyboardInterrupt once, at one of the places where Python looks for signals.

    Args:
        number: of the place, from 0.
        files: ends of the names of the files that count.

    Attributes:
        count: of the places that were passed.
        raised: whether it was.
    """

    def __init__(self, number, files):
        self.number, self.files, self.count, self.raised = number, files, 0, False

    @contextmanager
    def __call__(self):
        """Watches the code of this thread that begins inside of the ``with`` block."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code, last = frame.f_code.co_code, ""

        def look(frame, event, arg):
            nonlocal last
            if event == "opcode":
                looks, last = last.startswith(_LOOKS), dis.opname[code[frame.f_lasti]]
                self.count += looks
                if looks and self.count - 1 == self.number:
                    self.raised = True
                    raise KeyboardInterrupt
            return look

        return look
