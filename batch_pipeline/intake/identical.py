"""Which requests of a batch are identical, so that one call of the engine may serve them all.

Identical are requests with the very same bytes of a body whose answer does not depend on chance: with temperature 0,
with a seed that reaches the engine, or of an endpoint that makes no text. A field that is written in another way makes
another request.
"""

from __future__ import annotations

import hashlib
import os

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batch_pipeline.errors import ProofFailed
from batch_pipeline.intake.bodies import FORWARDED

_WITHOUT_CHANCE = frozenset({"/v1/embeddings"})


class _Sampling(msgspec.Struct):
    temperature: object = None
    seed: object = None


_decode = msgspec.json.Decoder(_Sampling).decode


def first_twins(segment: pa.Table, descriptor: int, endpoint: str) -> npt.NDArray[np.int64]:
    """Return for each row of a segment of the request table the first row with the same request: itself where there is
    none before. `descriptor` is the open input file.

    Cost: each body is read and hashed once. Memory: 16 bytes of hash, and what Python adds to them, for each row.
    """
    starts = segment.column("line_offset").to_numpy() + segment.column("body_start").to_numpy()
    lengths = segment.column("body_bytes").to_numpy()
    twins = np.arange(segment.num_rows, dtype=np.int64)
    first: dict[bytes, int] = {}
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        body = os.pread(descriptor, length, start)
        if len(body) != length:
            raise ProofFailed([f"the input ends before byte {start + length}, which was validated"])
        if endpoint in _WITHOUT_CHANCE or _leaves_nothing_to_chance(body, endpoint):
            twins[row] = first.setdefault(hashlib.blake2b(body, digest_size=16).digest(), row)
    return twins


def _leaves_nothing_to_chance(body: bytes, endpoint: str) -> bool:
    sampling = _decode(body)
    temperature, seed = sampling.temperature, sampling.seed
    is_greedy = isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
    # Anthropic's API has none: what is left out of a body decides nothing.
    is_seeded = isinstance(seed, int) and not isinstance(seed, bool) and "seed" in FORWARDED[endpoint]
    return is_greedy or is_seeded
