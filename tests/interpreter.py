"""Triton's interpreter without the time that it takes in front of every call of one jitted function by another.

It replaces the functions of ``triton.language`` by its own when a kernel is launched, and once more for each call
within the kernel, where all of them have been replaced already: looking for what is left took a third of a test's time.
"""

import inspect

import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    """Leave the language alone where it is the interpreter's already."""
    patch = interpreter._patch_lang
    languages = {}

    def patch_unless_patched(fn):
        if fn not in languages:
            modules = [x for x in fn.__globals__.values() if inspect.ismodule(x)]
            languages[fn] = [x for x in (tl, tl.core) if x in modules]
        if not languages[fn] or any(tl.core.is_builtin(language.load) for language in languages[fn]):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_unless_patched
