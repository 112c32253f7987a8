"""Decode attention over the paged cache in Triton: one query token for each sequence, whose K and V it appends.

One program serves one sequence, one K/V head with its query heads, and one part (split) of the keys.
The new token's K and V are attended first, from registers where the kernel appends them itself; see
``rosebatch_kernels.common.decode_step``.

The batch size alone fixes the number of splits, so that a CUDA graph can hold the launch. The sequence's length decides
at run time where a split begins. Splits that a short sequence does not need return at once. Where all sequences are
short, there is another graph without splits. The last split of a head to finish merges the parts by log-sum-exp
(flash-decoding), without a second launch.

With ``pieces`` in the sizes, the position alone fixes the result's bits, whatever the batch: the keys are cut in pieces
at places that follow from it, and the pieces' sums are folded in order. A program attends to one piece or to several.
"""

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.decode_step import (
    first_line,
    is_last,
    new_key,
    query_halves,
    result_arguments,
    token_arguments,
)
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.head_norms import HeadNorm
from rosebatch_kernels.common.heads import normed_and_rotated, normed_values, turn, weight_halves
from rosebatch_kernels.common.kv_tiles import load_tile, pages_of, place_in, place_of, store, stored
from rosebatch_kernels.common.launch import LINE, launch_options, lines_of, prefetch, wait, wait_before_return
from rosebatch_kernels.common.scores import capped, scaled, score_factors, sink_weights
from rosebatch_kernels.common.shared_keys import MAX_PARTS, SharedKeys
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.common.whole_numbers import next_power_of_2
from rosebatch_kernels.paged_attention.attend_shared import attend_shared
from rosebatch_kernels.paged_attention.online_softmax import (
    LIFT,
    attend,
    attend_tiles,
    fold,
    leave,
    left,
    no_key,
    no_key_in_order,
    one_column,
    queries,
    seen_by,
)
from rosebatch_kernels.paged_attention.sizes import (
    Sizes,
    adds_in_order,
    max_registers,
    program_of,
    requests_early,
    tile_rows,
    tiles_of_split,
)

_LINE_BITS = tl.constexpr(8 * LINE)
_SHARED_PARTS = tl.constexpr(MAX_PARTS)


def decode(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    workspace: DecodeWorkspace,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: HeadNorm | None = None,
    append: bool = True,
    keys: SharedKeys | None = None,
    queries: int = 1,
    divided: bool = True,
    scales: Tensor | None = None,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """Attention of one new token for each sequence.

    Args:
        qkv: ``[B, (heads + 2 · kv_heads) · D]``, q then k then v, the projection's output.
        cache: ``[2, blocks, kv_heads, block_size, D]``; with ``append`` the new K and V are written into it.
        block_table: ``[B / queries, M]`` int32 block ids, rows at any stride.
        positions: ``[B]`` int32 at any stride, of the new token.
        limits: ``[B]`` int32 at the same stride; a row with ``position >= limit`` is skipped, its output undefined.
        workspace: for partial results.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k.
        window: keys that the token sees, its own included; 0 for all. Blocks without such a key are not read.
        soft_cap: a score becomes ``soft_cap · tanh(score / soft_cap)``, as in Gemma 2; 0 for no cap.
        sinks: ``[heads]``, a further logit of each head's softmax, which has no value, as in gpt-oss.
        rotary: ``(cos, sin)``, ``[max_len, R]`` each in qkv's dtype; both halves of cos are equal, the first half of
            sin is negated. The first R of D channels are rotated. None where q and k are rotated already, or never.
        qk_norm: of each head, before the rotation.
        append: False where the new K and V are in the cache already; q is then neither normalised nor rotated.
        keys: that rows share, attended to once for all of them by a kernel before this one; None where there is a
            window.
        queries: successive rows of a sequence, which have one block table; more than one need their K and V in the
            cache already, and may not share keys.
        divided: False if no row has more than ``undivided_keys``. The result is the same, without programs for splits
            that have nothing to do.
        scales: ``[2, blocks, kv_heads, block_size, 1]`` fp32 of a cache of e4m3, see
            ``rosebatch_kernels.common.e4m3``; with ``append`` they are written too. None for a cache of floats.
        sizes: of programs.

    Returns:
        ``[B, heads · D]``.
    """
    batch = len(qkv)
    _, _, kv_heads, block_size, size = cache.shape
    group = num_heads // kv_heads
    splits = workspace.num_splits(batch) if divided else 1
    program = program_of(group, size, qkv.dtype, e4m3=scales is not None, sizes=sizes)
    registers = program.registers
    if splits == 1 or keys is not None or sizes.decode.pieces:
        programs = batch * kv_heads * splits if keys is None else None
        registers = max_registers(program, group, qkv.dtype, size, programs, device, sizes=sizes)
    tokens = token_arguments(
        qkv,
        cache,
        block_table,
        positions,
        limits,
        num_heads=num_heads,
        rotary=rotary,
        qk_norm=qk_norm,
        append=append,
    ) | {"scales": scales}
    out, results = result_arguments(qkv, cache, workspace, keys, num_heads=num_heads)
    scores = score_factors(scale, soft_cap)
    if keys is not None:
        assert not window, "the keys that a row shares have not left its window"
        assert not sizes.decode.pieces or adds_in_order(qkv.dtype, e4m3=scales is not None), "one order for all rows"
        assert queries == 1, "rows that share keys are of different sequences"
        attend_shared(tokens, results["shared"], keys, scores, program.keys, sizes=sizes, device=device)
    # A tile's keys lie together within a block.
    early = keys is None and requests_early(batch, sizes=sizes) and block_size % program.keys == 0
    members, rows = next_power_of_2(group), tile_rows(group, qkv.dtype, sizes=sizes)
    # Where one query would be copied, several have one tile.
    together = min(queries, rows // members)
    _decode[(kv_heads, batch // together, splits)](
        **tokens,
        **results,
        scores=scores,
        sinks=sinks,
        window=window,
        min_tiles=tiles_of_split(batch, kv_heads, program, sizes=sizes),
        MEMBERS=members,
        ROWS=rows,
        TILE=program.keys,
        SPLITS=splits,
        PIECES=sizes.decode.pieces,
        PIECE_TILES=sizes.decode.piece_keys // program.keys,
        APPEND=append,
        QUERIES=queries,
        TOGETHER=together,
        STAGES=program.stages,
        EARLY_LINES=lines_of(program.keys * size * cache.itemsize) if early else 0,
        num_warps=program.warps,
        maxnreg=registers,
        **launch_options(device),
    )
    return out


@triton.jit(do_not_specialize=["num_blocks", "min_tiles"])
def _decode(
    out,
    tokens,
    cache,
    scales,
    block_table,
    partials,
    shared,
    scores,
    sinks,
    num_blocks,
    table_stride,
    window,
    min_tiles,
    SHAPE: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_TILES: tl.constexpr,
    APPEND: tl.constexpr,
    QUERIES: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1) * TOGETHER
    # The slowest axis: splits that short sequences do not need start last.
    split = tl.program_id(2)
    # Written by the previous step's feedback, which is older than this kernel's predecessor.
    position = tl.load(tokens.positions + row * tokens.state_stride)
    if position >= tl.load(tokens.limits + row * tokens.state_stride):
        # Then none of the next rows of its sequence is live.
        wait_before_return(split == 0, PDL)
        return
    # The keys before the new one: [first, end). That one is attended apart, so that both forms give the same bits.
    end = position
    seen = _first_in_window(position, window)
    first = seen
    # A matrix product needs more rows than a group has heads: rows are copied, after norm and rotation of each head.
    copies: tl.constexpr = ROWS // MEMBERS
    g, own_head = _heads_of_rows(SHAPE.GROUP, ROWS, copies, TOGETHER)
    line_row = row
    if TOGETHER > 1:
        line_row, places, alive = _queries_together(tokens, row, ROWS, copies, TOGETHER)
        own_head = own_head & alive
        end = tl.max(tl.where(alive, places, position), 0)
    if shared is not None:
        first = tl.load(shared.begins + row)
    if PIECES:
        first_tile, tiles, share, used, origin, piece = _shares_of_pieces(
            seen, first, end, min_tiles, TILE, SPLITS, PIECES, PIECE_TILES
        )
    else:
        first_tile, tiles, share, used = _shares(first, end, min_tiles, TILE, SPLITS)
        origin = first_tile
    if split >= used:
        return
    start_tile = tl.maximum(origin + split * share, first_tile)
    stop_tile = tl.minimum(origin + (split + 1) * share, first_tile + tiles)
    pages = pages_of(cache, scales, num_blocks, block_table + row // QUERIES * table_stride, head, SHAPE)
    block = tl.load(pages.table + tl.minimum(start_tile * TILE, tl.maximum(end - 1, 0)) // SHAPE.BLOCK)
    turned = turn(tokens.rotary, position, SHAPE)
    m = tl.arange(0, MEMBERS)[:, None]
    one = tl.zeros([1, 1], tl.int32)
    q_weights = weight_halves(tokens.q_norm, head * SHAPE.GROUP + m, m < SHAPE.GROUP, SHAPE)
    k_weights = weight_halves(tokens.k_norm, head + one, one == 0, SHAPE)
    sink = _sinks_of(sinks, head, g, SHAPE)
    if EARLY_LINES and PDL:
        _request_tile(pages, block, start_tile * TILE, SHAPE, TILE, EARLY_LINES)
    # The kernel of the shared keys has waited for the one that wrote qkv; its own results are taken over last.
    if PDL and shared is None:
        wait()
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    # All loads are issued before the first use of any.
    q_halves = query_halves(tokens, row, head * SHAPE.GROUP + m, m < SHAPE.GROUP, SHAPE)
    if APPEND:
        k_halves, v_new = new_key(tokens, row, head, SHAPE)
    q = queries(normed_and_rotated(q_halves, q_weights, turned, SHAPE), scores, pages)
    sums = no_key(ROWS, SHAPE.WIDTH)
    e4m3: tl.constexpr = cache.dtype.element_ty == tl.uint8
    if split == 0:
        place = place_of(pages, position, SHAPE)
        if APPEND:
            k_new = normed_and_rotated(k_halves, k_weights, turned, SHAPE)
            v_new = normed_values(v_new, k_weights, SHAPE)
            k_read, v_read = store(pages, place, k_new, v_new, d < SHAPE.D, SHAPE.D)
        else:
            k_read, v_read = stored(pages, place, d < SHAPE.D, SHAPE.D)
        sums = _attend_new(q, k_read, v_read, sums, scores, copies, e4m3)
    q = _repeated(q, copies)
    keys_of_split = first, end, start_tile, stop_tile, block
    bounds = first, end
    if TOGETHER > 1:
        bounds = _first_in_window(places, window), places
        rows = row, line_row, head, split
        q, sums = _with_other_queries(q, sums, tokens, pages, scores, rows, m, d, SHAPE, copies, TOGETHER, e4m3)
    # Before any branch: computed in each of its arms, the mask costs some variants 18 to 33 registers a thread.
    wanted = (d < SHAPE.D) & own_head[:, None]
    result = out, partials, sinks, row, line_row, head, split, used, g, wanted, own_head, d
    if PIECES:
        line = first_line(line_row, head, PIECES, SHAPE)
        places_of_pieces = origin, piece, row, split, line, g, wanted, own_head, d
        sums = _attend_pieces(
            q, pages, keys_of_split, bounds, places_of_pieces, partials, shared, sums, scores,
            SHAPE, TILE, SPLITS, TOGETHER > 1, not e4m3 and out.dtype.element_ty != tl.float32, STAGES, PDL,
        )  # fmt: skip
        pieces = share // piece, tl.cdiv(first_tile + tiles - origin, piece)
        _finish_pieces(result, pieces, line, sums, sink, SHAPE, SPLITS)
        return
    sums = attend_tiles(q, pages, keys_of_split, bounds, sums, scores, SHAPE, TILE, TOGETHER > 1, STAGES)
    if shared is not None:  # noqa: SIM102 (a compile-time condition)
        if split == 0:
            sums = _take_shared(shared, row, head, g, own_head, d, sums, SHAPE, PDL)
    if used == 1:
        _finish(out, line_row, head, sums, sink, g, wanted, d, SHAPE)
        return
    _finish_splits(result, tokens, sums, SHAPE, SPLITS, TOGETHER)


@triton.jit
def _queries_together(tokens, row, ROWS: tl.constexpr, COPIES: tl.constexpr, TOGETHER: tl.constexpr):
    """In place of copies, queries of one sequence from ``row`` on: their rows, positions, and whether each is live.

    Those that are live are the first.
    """
    rows = row + tl.arange(0, ROWS) % COPIES % TOGETHER
    places = tl.load(tokens.positions + rows * tokens.state_stride)
    return rows, places, places < tl.load(tokens.limits + rows * tokens.state_stride)


@triton.jit
def _finish_pieces(result, pieces, line, sums, sink, SHAPE: tl.constexpr, SPLITS: tl.constexpr):
    """Write the result, if no other split is still at work: the sums of split 0, and of the pieces of the others."""
    out, partials, _, row, line_row, head, split, used, g, wanted, own_head, d = result
    last = True
    if SPLITS > 1:  # noqa: SIM102 (a compile-time condition)
        if used > 1:
            if split == 0:
                leave(partials, line + g, sums, wanted, own_head, d, SHAPE)
            last = is_last(partials, row, head, used, SHAPE)
            if last:
                sums = left(partials, line + g, wanted, own_head, d, SHAPE)
                for number in range(pieces[0], pieces[1]):
                    part = left(partials, line + number * SHAPE.GROUP + g, wanted, own_head, d, SHAPE)
                    sums = fold(sums, part)
    if last:
        _finish(out, line_row, head, sums, sink, g, wanted, d, SHAPE)


@triton.jit
def _finish_splits(result, tokens, sums, SHAPE: tl.constexpr, SPLITS: tl.constexpr, TOGETHER: tl.constexpr):
    """Leave a split's sums, and write the result if it is the last one."""
    out, partials, sinks, row, line_row, head, split, used, g, wanted, own_head, d = result
    line = first_line(line_row, head, SPLITS, SHAPE)
    leave(partials, line + split * SHAPE.GROUP + g, sums, wanted, own_head, d, SHAPE)
    if is_last(partials, row, head, used, SHAPE):
        for number in tl.static_range(TOGETHER):
            out_row = out + (row + number).to(tl.int64) * (SHAPE.HEADS * SHAPE.D)
            place_of_state = (row + number) * tokens.state_stride
            # Rows that are not live have left nothing.
            if tl.load(tokens.positions + place_of_state) < tl.load(tokens.limits + place_of_state):
                own_line = first_line(row + number, head, SPLITS, SHAPE)
                _merge(out_row, partials, sinks, own_line, head, used, d, SHAPE, SPLITS)


@triton.jit
def _with_other_queries(
    q,
    sums,
    tokens,
    pages,
    scores,
    rows,
    m,
    d,
    SHAPE: tl.constexpr,
    COPIES: tl.constexpr,
    TOGETHER: tl.constexpr,
    E4M3: tl.constexpr,
):
    """Queries, and sums over the new keys, with those of a sequence's further rows; K and V are in the cache.

    Each is computed in the form of a single one, so that the bits are the same.
    """
    row, line_row, head, split = rows
    for other in tl.static_range(1, TOGETHER):
        chosen = line_row == row + other
        q_other, _ = query_halves(tokens, row + other, head * SHAPE.GROUP + m, m < SHAPE.GROUP, SHAPE)
        q_other = queries(q_other, scores, pages)
        q = tl.where(chosen[:, None], _repeated(q_other, COPIES), q)
        if split == 0:
            place = place_of(pages, tl.load(tokens.positions + (row + other) * tokens.state_stride), SHAPE)
            k_read, v_read = stored(pages, place, d < SHAPE.D, SHAPE.D)
            new = _attend_new(q_other, k_read, v_read, no_key(q.shape[0], SHAPE.WIDTH), scores, COPIES, E4M3)
            sums = _chosen(chosen, new, sums)
    return q, sums


@triton.jit
def _request_tile(pages, block, n, SHAPE: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr):
    """Start to bring the first tile of K and V into the L2 cache.

    Older steps wrote the cached keys. More tiles would compete with this kernel's predecessor.
    """
    keys = pages.cache + place_in(pages, block, n, SHAPE)
    _request(keys, TILE * SHAPE.D, LINES)
    _request(keys + pages.v_distance, TILE * SHAPE.D, LINES)


@triton.jit
def _request(first, SIZE: tl.constexpr, LINES: tl.constexpr):
    """Start to bring ``SIZE`` successive elements into the L2 cache."""
    line: tl.constexpr = _LINE_BITS // first.dtype.element_ty.primitive_bitwidth
    prefetch(first + tl.minimum(tl.arange(0, LINES) * line, SIZE - 1))


@triton.jit
def _first_in_window(position, window):
    """The first key that a token sees, of one token or of several."""
    first = 0 * position
    if window > 0:
        first = tl.maximum(position + 1 - window, 0)
    return first


@triton.jit
def _shares(first, end, min_tiles, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """The keys ``[first, end)`` in tiles: the first tile, their number, the number of each split, and splits in use."""
    first_tile = first // TILE
    tiles = tl.cdiv(end, TILE) - first_tile
    used = tl.maximum(tl.minimum(tiles // min_tiles, SPLITS), 1)
    # At least one: without a cached key, one split still has the new one.
    share = tl.maximum(tl.cdiv(tiles, used), 1)
    # Rounded up, shares may leave nothing for the last split.
    used = tl.maximum(tl.cdiv(tiles, share), 1)
    return first_tile, tiles, share, used


@triton.jit
def _shares_of_pieces(
    seen,
    first,
    end,
    min_tiles,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_TILES: tl.constexpr,
):
    """The same, shares of whole pieces; then the tile at which these begin, and the tiles of a piece.

    Places of pieces follow from the first key ``seen`` and from ``end`` alone. Keys before ``first`` are shared; they
    are whole pieces. There are at most ``PIECES`` pieces, see ``Pieces``.
    """
    first_tile = first // TILE
    stop = tl.cdiv(end, TILE)
    origin = seen // TILE // PIECE_TILES * PIECE_TILES
    piece = tl.full([], PIECE_TILES, tl.int32)
    while piece * PIECES < stop - origin:
        piece *= 2
    origin += (first_tile - origin) // piece * piece
    pieces = tl.cdiv(stop - origin, piece)
    used = tl.maximum(tl.minimum((stop - first_tile) // min_tiles, SPLITS), 1)
    share = tl.maximum(tl.cdiv(pieces, used), 1)
    used = tl.maximum(tl.cdiv(pieces, share), 1)
    return first_tile, stop - first_tile, share * piece, used, origin, piece


@triton.jit
def _attend_pieces(
    q,
    pages,
    keys,
    bounds,
    places,
    partials,
    shared,
    sums,
    scores,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    EMPTY: tl.constexpr,
    IN_ORDER: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sums with those over a split's pieces, folded in order. All splits but 0 leave those of each piece, too.

    Split 0 folds the shared pieces in front of its first one, which is computed beside their kernel.

    A loop for each piece: with a branch at its end in one loop for all, the compiler keeps one more tile of keys.
    """
    first, end, start_tile, stop_tile, block = keys
    origin, piece, row, split, line, g, wanted, own_head, d = places
    first_piece = (start_tile - origin) // piece
    last_piece = tl.cdiv(stop_tile - origin, piece)
    if shared is not None:
        # A row may have no key of its own but the new one.
        last_piece = tl.maximum(last_piece, first_piece + 1)
    for number in tl.range(first_piece, last_piece, num_stages=1):
        begin = tl.maximum(origin + number * piece, start_tile)
        stop = tl.minimum(origin + (number + 1) * piece, stop_tile)
        part = no_key_in_order(q.shape[0], SHAPE.WIDTH) if IN_ORDER else no_key(q.shape[0], SHAPE.WIDTH)
        for tile in tl.range(begin, stop, num_stages=STAGES):
            n = tile * TILE + tl.arange(0, TILE)
            keys_of_tile, block = load_tile(pages, block, tile * TILE, first, end, SHAPE, TILE, True, True)
            part = attend(q, keys_of_tile, seen_by(n, bounds), part, scores, EMPTY)
        of_piece = one_column(part) if IN_ORDER else part
        if SPLITS > 1:  # noqa: SIM102 (a compile-time condition)
            if split > 0:
                leave(partials, line + number * SHAPE.GROUP + g, of_piece, wanted, own_head, d, SHAPE)
        if shared is not None:  # noqa: SIM102 (a compile-time condition)
            if (split == 0) & (number == first_piece):
                if PDL:
                    wait()
                for shared_piece in range(tl.load(shared.counts + row)):
                    own = line + shared_piece * SHAPE.GROUP + g
                    sums = fold(sums, left(shared, own, wanted, own_head, d, SHAPE))
        sums = fold(sums, of_piece)
    return sums


@triton.jit
def _place_in_result(out, row, head, g, d, SHAPE: tl.constexpr):
    """Where heads ``g [ROWS]`` of a group go, of one row or of rows ``[ROWS]``."""
    first = row.to(tl.int64) * (SHAPE.HEADS * SHAPE.D) + (head * SHAPE.GROUP + g) * SHAPE.D
    return out + first[:, None] + d


@triton.jit
def _chosen(rows, some, others):
    """The online softmax's sums, in which these rows ``[ROWS]`` are those of ``some``."""
    row_max, total, acc = some
    row_max_of_others, total_of_others, acc_of_others = others
    acc = tl.where(rows[:, None], acc, acc_of_others)
    return tl.where(rows, row_max, row_max_of_others), tl.where(rows, total, total_of_others), acc


@triton.jit
def _finish(out, row, head, sums, sink, g, wanted, d, SHAPE: tl.constexpr):
    """Write the heads of group ``head`` to one row of the result, or to rows ``[ROWS]``."""
    row_max, total, acc = sums
    if sink is not None:
        total += sink_weights(sink, row_max)
    place = _place_in_result(out, row, head, g, d, SHAPE)
    tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _sinks_of(sinks, head, g, SHAPE: tl.constexpr):
    """The sinks of a group's heads ``g``; None where there are none."""
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head * SHAPE.GROUP + g, mask=g < SHAPE.GROUP, other=0.0)
    return sink


@triton.jit
def _heads_of_rows(GROUP: tl.constexpr, ROWS: tl.constexpr, COPIES: tl.constexpr, TOGETHER: tl.constexpr):
    """The head ``[ROWS]`` of each row of copied heads, and whether the row is among the first of an existing head."""
    g = tl.arange(0, ROWS) // COPIES
    return g, (g < GROUP) & (tl.arange(0, ROWS) % COPIES < TOGETHER)


@triton.jit
def _attend_new(q, k, v, sums, scores, COPIES: tl.constexpr, LIFTED: tl.constexpr):
    """The online softmax's sums over the new key alone, from those over no key."""
    _, total, acc = sums
    product = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    if LIFTED:
        weight: tl.constexpr = 2.0**LIFT
        return _repeated(capped(product, scores) - LIFT, COPIES), total + weight, acc + v * weight
    return _repeated(scaled(product, scores), COPIES), total + 1.0, acc + v.to(tl.float32)


@triton.jit
def _take_shared(shared, row, head, g, own_head, d, sums, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """The online softmax's sums with those of a row's partial results."""
    line = first_line(row, head, _SHARED_PARTS, SHAPE)
    count = tl.load(shared.counts + row)
    if PDL:
        wait()
    row_max, total, acc = sums
    for i in range(count):
        own = line + i * SHAPE.GROUP + g
        # Copies and rows that stand for no head read nothing and stay finite.
        top = tl.load(shared.stats + own * 2, mask=own_head, other=0.0, cache_modifier=".cg")
        weights = tl.load(shared.stats + own * 2 + 1, mask=own_head, other=1.0, cache_modifier=".cg")
        wanted = own_head[:, None] & (d < SHAPE.D)
        place = shared.sums + own.to(tl.int64)[:, None] * SHAPE.D + d
        values = tl.load(place, mask=wanted, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(row_max, top)
        shrink = tl.exp2(row_max - higher)
        factor = tl.exp2(top - higher)
        total = total * shrink + weights * factor
        acc = acc * shrink[:, None] + values * factor[:, None]
        row_max = higher
    return row_max, total, acc


@triton.jit
def _repeated(x, COPIES: tl.constexpr):
    """``x`` with ``COPIES`` of each row, one after the other."""
    if COPIES > 1:
        if len(x.shape) == 1:
            x = tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], COPIES]), [x.shape[0] * COPIES])
        else:
            shape: tl.constexpr = [x.shape[0], COPIES, x.shape[1]]
            x = tl.reshape(tl.broadcast_to(x[:, None, :], shape), [x.shape[0] * COPIES, x.shape[1]])
    return x


@triton.jit
def _merge(out_row, partials, sinks, line, head, used, d, SHAPE: tl.constexpr, SPLITS: tl.constexpr):
    """Write the heads of group ``head`` to a row of the result, from the ``used`` splits' results from ``line`` on."""
    s = tl.arange(0, SPLITS)
    there = s < used
    for member in tl.static_range(tl.constexpr(SHAPE.GROUP)):
        lines = line + s * SHAPE.GROUP + member
        tops = tl.load(partials.stats + lines * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(partials.stats + lines * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        row_max = tl.max(tops, 0)
        factors = tl.exp2(tops - row_max)
        total = tl.sum(parts * factors, 0)
        if sinks is not None:
            total += sink_weights(tl.load(sinks + head * SHAPE.GROUP + member), row_max)
        values = tl.load(
            partials.sums + lines.to(tl.int64)[:, None] * SHAPE.D + d,
            mask=there[:, None] & (d < SHAPE.D),
            other=0.0,
            cache_modifier=".cg",
        )
        merged = tl.sum(values * factors[:, None], 0) / total
        place = out_row + (head * SHAPE.GROUP + member) * SHAPE.D + d
        tl.store(place, merged[None, :].to(out_row.dtype.element_ty), mask=d < SHAPE.D)
