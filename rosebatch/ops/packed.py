"""Matrices that stay quantized on a GPU: what formats make, and kernels take."""

from rosebatch_kernels.common.packing import CHUNK as CHUNK
from rosebatch_kernels.common.packing import MIDDLE as MIDDLE
from rosebatch_kernels.common.packing import empty_words as empty_words
from rosebatch_kernels.common.packing import pack_ as pack_
from rosebatch_kernels.experts.packed import MAX_EXPONENT as MAX_EXPONENT
from rosebatch_kernels.experts.packed import Packed as Packed
from rosebatch_kernels.experts.packed import can_decode as can_decode
from rosebatch_kernels.experts.packed import piece_of as piece_of
