"""Who may look at whom. Every pattern exists twice: as a function of positions, and as the array that the function gives.

    mod(b, h, q_idx, kv_idx) → bool         for batch row, head, and the positions of a query and a key: may it attend?
    ..._mask(…) → bool [Tq, Tk] or [B, 1, T, T]         the same at all positions;  True = may attend, as in `allowed`

A mod gets int64 tensors, b [B, 1, 1, 1], h [1, H, 1, 1], q_idx [Tq, 1], kv_idx [1, Tk], and returns a bool tensor that broadcasts
to [B, H, Tq, Tk]: the convention of PyTorch's FlexAttention. Large scores are computed in tiles, and for each of them a mod is asked
with the q_idx and kv_idx of the tile alone. The queries are the last Tq of the Tk positions (with a cache the new tokens are),
unless query_offset gives the position of the first. A mask says what is connected; to skip the work of what is not takes a kernel
that knows the pattern (guide 2.2).
"""
from functools import reduce
from operator import and_, or_

from ..arguments import described, require_functions, whole_number
from ..autograd import constant
from ..creation import arange, as_tensor, eye, ones
from ..dtypes import bool_, float32
from ..ops.sdpa import checked_offset
from ..tensor import Tensor

# --- mods -------------------------------------------------------------------------------------------------------------


def full_mod(b, h, q_idx, kv_idx):
    """Every query sees every key."""
    return ones(q_idx.shape[-2], kv_idx.shape[-1], dtype=bool_, device=q_idx.device)


def causal_mod(b, h, q_idx, kv_idx):
    """j ≤ i        (guide 4.3)"""
    return kv_idx <= q_idx


def sliding_window_mod(width):
    """max(0, i − width + 1) ≤ j ≤ i: causal, and at most `width` keys, the query's own among them.        (guide 2.2)"""
    width = _distance("sliding_window", "width", width, 1)
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx > q_idx - width)


def local_mod(radius):
    """|i − j| ≤ radius: not causal, up to 2 · radius + 1 keys. The guide calls both this and the width `window`."""
    radius = _distance("local", "radius", radius, 0)
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= radius


def block_sparse_mod(block_size, blocks):
    """blocks[i // block_size, j // block_size].    blocks: bool [nb, nb], or a function of the two numbers of blocks"""
    block_size = _distance("block_sparse", "block_size", block_size, 1)
    if not callable(blocks):
        _require_bool("block_sparse: blocks", blocks)

    def block_sparse(b, h, q_idx, kv_idx):
        q_block, kv_block = q_idx // block_size, kv_idx // block_size
        return blocks(q_block, kv_block) if callable(blocks) else _look_up("block_sparse", blocks, q_block, kv_block)
    return block_sparse


def global_token_mod(radius, global_tokens, causal=False):
    """|i − j| ≤ radius, or i or j is one of the global tokens; with `causal` also j ≤ i.        (guide 2.2)

    global_tokens: their positions, or a number G for the first G. They see all and are seen by all: two steps to anywhere.
    """
    local = local_mod(radius)
    is_global = _member_of(global_tokens)

    def local_and_global(b, h, q_idx, kv_idx):
        seen = local(b, h, q_idx, kv_idx) | is_global(q_idx) | is_global(kv_idx)
        return seen & (kv_idx <= q_idx) if causal else seen
    return local_and_global


def padding_mod(valid_tokens):
    """valid_tokens[b, j]: real keys are seen, also by padded queries.    valid_tokens: bool [B, Tk]        (guide 9.6)"""
    _require_bool("padding: valid_tokens", valid_tokens, "[B, T]")
    return lambda b, h, q_idx, kv_idx: _look_up("padding", valid_tokens, b, kv_idx)


def packing_mod(segment_ids, causal=True):
    """segment[b, i] = segment[b, j], and j ≤ i if causal: texts in one row do not see each other.        (guide 15.3)

    segment_ids: int [B, T]. A negative number marks padding: it sees nothing, and nothing sees it.
    """
    if not isinstance(segment_ids, Tensor) or segment_ids.ndim != 2 or segment_ids.is_floating_point():
        raise ValueError(f"packing: segment_ids must be whole numbers [B, T], one for each token, got {described(segment_ids)}")

    def packing(b, h, q_idx, kv_idx):
        mine, theirs = (_look_up("packing", segment_ids, b, idx) for idx in (q_idx, kv_idx))
        same = (mine == theirs) & (mine >= 0)
        return same & (kv_idx <= q_idx) if causal else same
    return packing


def and_masks(*mods):
    """What all mods allow."""
    return _Combined(and_, mods)


def or_masks(*mods):
    """What any of the mods allows."""
    return _Combined(or_, mods)


# --- arrays -----------------------------------------------------------------------------------------------------------

def full_mask(Tq, Tk=None, device=None):
    """[Tq, Tk], all True."""
    return _plane(full_mod, Tq, Tk, None, device)


def causal_mask(T, Tk=None, query_offset=None, device=None):
    """[T, Tk], `causal_mod`."""
    return _plane(causal_mod, T, Tk, query_offset, device)


def sliding_window_mask(T, width, Tk=None, query_offset=None, device=None):
    """[T, Tk], `sliding_window_mod`: T = 6 and width 3 give rows with 1, 2, 3, 3, 3, 3 keys."""
    return _plane(sliding_window_mod(width), T, Tk, query_offset, device)


def local_mask(T, radius, Tk=None, query_offset=None, device=None):
    """[T, Tk], `local_mod`: T = 6 and radius 1 give rows with 2, 3, 3, 3, 3, 2 keys."""
    return _plane(local_mod(radius), T, Tk, query_offset, device)


def block_sparse_mask(T, block_size, blocks, device=None):
    """[T, T], `block_sparse_mod`. ValueError unless blocks has a row and a column for each of the ⌈T / block_size⌉ blocks."""
    mod = block_sparse_mod(block_size, blocks)
    nb = -(-T // block_size)
    if not callable(blocks) and tuple(blocks.shape) != (nb, nb):
        raise ValueError(f"block_sparse: {T} positions in blocks of {block_size} need blocks of shape ({nb}, {nb}), got "
                         f"{tuple(blocks.shape)}")
    return _plane(mod, T, None, None, device)


def global_token_mask(T, radius, global_tokens, causal=False, device=None):
    """[T, T], `global_token_mod`. ValueError for a global token that is not one of the T positions."""
    mod = global_token_mod(radius, global_tokens, causal)
    tokens = _positions(global_tokens)
    beyond = tokens[T:] if isinstance(tokens, range) else [g for g in tokens if g >= T]
    if beyond:
        raise ValueError(f"global_token: positions {beyond} are beyond the {T} tokens that there are")
    return _plane(mod, T, None, None, device)


def padding_mask(valid_tokens):
    """[B, 1, 1, T], `padding_mod`."""
    _require_bool("padding: valid_tokens", valid_tokens, "[B, T]")
    return valid_tokens[:, None, None, :]


def packing_mask(segment_ids, causal=True):
    """[B, 1, T, T], `packing_mod`."""
    mod = packing_mod(segment_ids, causal)
    B, T = segment_ids.shape
    return evaluate(mod, (B, 1, T, T), device=segment_ids.device)


def create_mask(mod, B, H, Tq, Tk, query_offset=None, device=None):
    """bool [B, H, Tq, Tk] of any mod; B or H may be None, for 1. PyTorch's q_idx counts from 0: there, query_offset=0."""
    shape = (1 if B is None else B, 1 if H is None else H, Tq, Tk)
    return evaluate(mod, shape, query_offset, device).expand(*shape)


def evaluate(mod, shape, query_offset=None, device=None, rows=None, keys=None):
    """The bool tensor of a mod at all of [B, H, Tq, Tk], as small as the mod makes it; what is not one raises.

    rows, keys: ranges, for a tile of it.
    """
    require_functions("masks", mask_mod=mod)
    rows, keys = range(shape[2]) if rows is None else rows, range(shape[3]) if keys is None else keys
    return _answer(mod, indices(shape, query_offset, device, rows, keys), shape, rows, keys)


def _answer(mod, where, shape, rows, keys):
    """What a mod says of a tile; of the parts of an and_masks each by itself, as each may be a table."""
    if isinstance(mod, _Combined):
        return reduce(mod.operation, (_answer(part, where, shape, rows, keys) for part in mod.mods))
    tile = (*shape[:2], len(rows), len(keys))
    try:
        found = mod(*where)
    except RuntimeError as error:
        if tile == shape or type(error) is not RuntimeError:
            raise
        raise RuntimeError(f"{error}; this came of a mask_mod {_asked_for(shape, rows, keys)}: a table in it is read at q_idx and "
                           f"kv_idx") from error
    _require_bool("mask_mod: what it returns", found)
    part = found if broadcasts_to(found.shape, tile) else _cut(found, shape, rows, keys)
    if not broadcasts_to(part.shape, tile):
        raise ValueError(f"mask_mod: {_asked_for(shape, rows, keys)}, it must return what broadcasts to {list(tile)}, got "
                         f"{tuple(found.shape)}; combine its arguments b [B, 1, 1, 1], h [1, H, 1, 1], q_idx [{len(rows)}, 1] and kv_idx "
                         f"[1, {len(keys)}] by broadcasting")
    return part


def _asked_for(shape, rows, keys):
    """For which tile, in an error."""
    whole = f"[B, H, Tq, Tk] = {list(shape)}"
    if (len(rows), len(keys)) == shape[2:]:
        return f"asked for {whole}"
    return f"asked tile by tile, here for queries {rows.start} to {rows.stop - 1} and keys {keys.start} to {keys.stop - 1} of {whole}"


def _cut(found, shape, rows, keys):
    """The tile of an answer that does not heed q_idx or kv_idx, such as a table [Tq, Tk]: it says the same as where nothing is tiled."""
    if found.ndim > 1 and found.shape[-2] == shape[2]:
        found = found[..., rows.start:rows.stop, :]
    return found[..., keys.start:keys.stop] if found.ndim and found.shape[-1] == shape[3] else found


def indices(shape, query_offset=None, device=None, rows=None, keys=None):
    """(b [B, 1, 1, 1], h [1, H, 1, 1], q_idx [Tq, 1], kv_idx [1, Tk]): what a mod is called with. rows, keys: ranges, for a tile."""
    B, H, Tq, Tk = shape
    first, rows, keys = first_query(Tq, Tk, query_offset), range(Tq) if rows is None else rows, range(Tk) if keys is None else keys

    def axis(numbers, first, *sizes):           # reshaped as an array: no step of a model, and so no row in its trace
        return constant(arange(first + numbers.start, first + numbers.stop, device=device).array.reshape(sizes))
    return (axis(range(B), 0, B, 1, 1, 1), axis(range(H), 0, 1, H, 1, 1), axis(rows, first, len(rows), 1),
            axis(keys, 0, 1, len(keys)))


def broadcasts_to(shape, full):
    """True where an array of this shape can be repeated to one of shape `full`."""
    return len(shape) <= len(full) and all(n in (1, m) for n, m in zip(shape[::-1], full[::-1]))


def first_query(Tq, Tk, query_offset, op="mask"):
    """The position of query 0 among the keys: Tk − Tq (aligned at the end) for None; 0 aligns top-left, as PyTorch does."""
    return Tk - Tq if query_offset is None else checked_offset(op, query_offset)


# --- counting ---------------------------------------------------------------------------------------------------------

def count_visible(allowed):
    """How many pairs of a query and a key are connected: the work that a kernel which skips the rest would do.    int"""
    _require_bool("count_visible: allowed", allowed)
    return int(allowed.sum())


def receptive_field(allowed, layers=1):
    """[T, T] bool: can output i, after so many layers with residuals, depend on input j?    allowed: [T, T]

    A window of width W reaches W − 1 further back with each layer: ⌈(T − 1) / (W − 1)⌉ layers to see all.   (guide 2.2)
    """
    _require_bool("receptive_field: allowed", allowed)
    if allowed.ndim != 2 or allowed.shape[0] != allowed.shape[1]:
        raise ValueError(f"receptive_field: allowed must be [T, T], every position once as query and once as key, got "
                         f"{tuple(allowed.shape)}")
    layers = whole_number("receptive_field", "layers", layers, 0)
    step = (allowed | eye(len(allowed), dtype=bool_, device=allowed.device)).to(float32)
    reached = eye(len(allowed), device=allowed.device)
    for _ in range(layers):
        reached = (step @ reached > 0).to(float32)
    return reached > 0


# --- inside -----------------------------------------------------------------------------------------------------------

def _plane(mod, Tq, Tk, query_offset, device):
    Tq = whole_number("mask", "T", Tq, 0)
    Tk = Tq if Tk is None else whole_number("mask", "Tk", Tk, 0)
    return evaluate(mod, (1, 1, Tq, Tk), query_offset, device)


def _look_up(op, table, rows, columns):
    """table[rows, columns]; IndexError for a negative place, which would otherwise be counted from the end of the table."""
    first = min((int(places.array.min()) for places in (rows, columns) if places.numel()), default=0)
    if first < 0:
        raise IndexError(f"{op}: a query stands before the first key, at place {first}, and what is told of it is nowhere; are there more "
                         f"queries than keys, or is query_offset negative?")
    return table.to(columns.device)[rows, columns]


class _Combined:
    """The mod that and_masks or or_masks makes of mods."""

    def __init__(self, operation, mods):
        if not mods:
            raise ValueError("and_masks and or_masks need at least one mod")
        for mod in mods:
            require_functions("and_masks and or_masks", mod=mod)
        self.operation, self.mods = operation, mods

    def __call__(self, b, h, q_idx, kv_idx):
        return reduce(self.operation, (mod(b, h, q_idx, kv_idx) for mod in self.mods))


def _member_of(global_tokens):
    """A function of positions: is it a global one?"""
    tokens = _positions(global_tokens)
    if isinstance(tokens, range):
        return lambda idx: (idx >= 0) & (idx < tokens.stop)
    return lambda idx: (idx.unsqueeze(-1) == as_tensor(tokens, dtype=idx.dtype, device=idx.device)).any(dim=-1)


def _positions(global_tokens):
    """The global tokens as a range (for a number) or a list of whole numbers ≥ 0."""
    if isinstance(global_tokens, Tensor):
        global_tokens = global_tokens.tolist()
    if isinstance(global_tokens, (list, tuple, range)):
        return [whole_number("global_token", "each of global_tokens", g, 0) for g in global_tokens]
    return range(_distance("global_token", "global_tokens", global_tokens, 0))


def _distance(op, name, value, least):
    """A whole number of positions; beyond 2⁶² one as good as another, and sums with a position stay within int64."""
    return min(whole_number(op, name, value, least), 1 << 62)


def _require_bool(what, x, shape=None):
    if not isinstance(x, Tensor) or x.dtype is not bool_:
        raise TypeError(f"{what} must be a bool tensor (True = may attend, or is real), got {described(x)}; compare, or .bool()")
    if shape is not None and x.ndim != 2:
        raise ValueError(f"{what} must have shape {shape}, got {tuple(x.shape)}")
