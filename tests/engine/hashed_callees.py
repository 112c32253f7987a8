"""Prints whether a kernel's hash is the same when a function that it calls was hashed before."""

import sys

import triton
import triton.language as tl

from rosebatch.engine.triton_runner.warm_up import _hash_callees_first

NUMBER = tl.constexpr(3)


@triton.jit
def callee(x):
    return x + NUMBER


@triton.jit
def kernel(x):
    tl.store(x, callee(tl.load(x)))


def hash_of(*before):
    """The kernel's, anew, behind those of other functions."""
    for function in (kernel, callee):
        function.hash = None
        function.used_global_vals = {}
    for function in before:
        _ = function.cache_key
    return kernel.cache_key


for prepare in (lambda: None, _hash_callees_first):
    prepare()
    sys.stdout.write(f"{triton.__version__} {hash_of() == hash_of(callee)}\n")
