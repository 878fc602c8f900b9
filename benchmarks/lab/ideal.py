"""The fewest bytes that a method's steps need on each link, by arithmetic alone.

Headers, metrics and control messages are not in them. A sum over `n` workers takes each of them
`2 (n - 1) / n` of a payload in either direction; where payloads cannot be summed on their way, each
worker gets `n - 1` of them.
"""

import math

_WORD = 4
_PLACE = 2
_ID = 8
_BLOCK = 256  # elements of int8 that share a scale
_BYTES = {None: 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1 + _WORD / _BLOCK, "sign": 1 / 8}


def links(traits, work, workers, ps):
    """Bytes of one step of all workers.

    Args:
        traits: `methods.Traits`.
        work: One of `work.SIZES`.
        workers: Number of workers.
        ps: Number of parameter servers, which share evenly.

    Returns:
        Dict from `"worker"` and, if there are servers, `"ps"` to the bytes that one of them sends
        and receives.
    """
    if traits.path == "alone":
        return {"worker": (0.0, 0.0)}
    dense = _payload(work, traits.compression, workers)
    whole = _payload(work, None, workers)
    table = _WORD * getattr(work, "rows", 0) * getattr(work, "dim", 0)
    if traits.path == "all_reduce":
        if traits.updates == "local":
            # Of a table, too, all is sent that may have changed.
            rows = 2 * (workers - 1) / workers * table * _BYTES.get(traits.rows, 4.0) / 4
        else:
            rows = (workers - 1) * _rows(work, traits.every, traits.rows)
        sent = (_summed(dense, traits.compression, workers) + rows) / traits.every
        return {"worker": (sent, sent)}
    # Rows' ids go up, and values come down; gradients go up with their ids.
    down = pulled = _rows(work, 1, traits.pull, of_each=0)
    up = _rows(work, traits.every, traits.rows) / traits.every + _rows(work, 1, of_row=0)
    if traits.path == "hybrid":
        ring = _summed(dense, traits.compression, workers) / traits.every
    else:
        ring = 0.0
        up += dense / traits.every
        values = whole if traits.pull is None else _payload(work, traits.pull, workers)
        down += values
        if traits.updates == "local":
            # One read of everything for each exchange.
            down = values / traits.every + pulled
    share = workers / ps
    return {"worker": (up + ring, down + ring), "ps": (share * down, share * up)}


def busiest(traits, work, workers, ps):
    """Bytes of one step in the direction of a link that has most of them."""
    return max(max(both) for both in links(traits, work, workers, ps).values())


def floor(compute_ms, link_bytes, rate):
    """Milliseconds below which a step cannot be: those of computing, or those of the bytes.

    Args:
        compute_ms: Milliseconds of a step without communication.
        link_bytes: As of `busiest`.
        rate: Bits per second of a link; None for no limit.
    """
    return max(compute_ms, 8e3 * link_bytes / rate if rate else 0.0)


def _payload(work, compression, workers):
    """Bytes of what one worker has to say about dense variables."""
    if (compression or "").startswith("factors"):
        return sum(
            _factors(shape, compression, work.batch_size, workers) for shape in work.dense_shapes()
        )
    return sum(_size(shape, compression) for shape in work.dense_shapes())


def _factors(shape, compression, batch, workers):
    """The fewer bytes of factors, and of what a ring sends to each of the others."""
    number = _BYTES[compression.partition(":")[2] or None]
    if len(shape) < 2:
        return 2 / workers * _size(shape, None)
    return number * min(batch * sum(shape), 2 / workers * math.prod(shape))


def _size(shape, compression):
    elements = math.prod(shape)
    name, _, argument = (compression or "").partition(":")
    if name == "nothing":
        return 0.0
    if len(shape) < 2 and name not in ("bf16", "fp16"):
        return _WORD * elements  # Vectors go whole.
    if name == "powersgd":
        return _WORD * int(argument) * sum(shape)
    if name == "topk":
        return (_WORD + _PLACE) * elements * float(argument)
    if name == "randomk":
        return _WORD * elements * float(argument)
    return elements * _BYTES[name or None]


def _summed(payload, compression, workers):
    if (compression or "").startswith(("topk", "factors")):
        return (workers - 1) * payload
    return 2 * (workers - 1) / workers * payload


def _rows(work, batches, compression=None, of_row=1, of_each=_ID):
    """Bytes of the distinct rows of some batches of one worker, each with its id."""
    if not hasattr(work, "rows_of"):
        return 0.0
    number = _BYTES[compression] if compression in ("bf16", "fp16", "int8") else _WORD
    return work.rows_of(batches) * (of_row * work.dim * number + of_each)
