"""The values that fields of bodies take, whatever the endpoint: msgspec's constraints, each with a name."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
NOTHING = Raw(b"null")

Words = Annotated[list[str], Meta(max_length=256)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1024)]


class Sampled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the bodies of OpenAI's endpoints that generate have in common."""

    model: str
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Unit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Seed | None = None
    stop: str | Words | None = None
    stop_token_ids: TokenIds | None = None


def is_given(raw: Raw) -> bool:
    """Return whether a field that is kept raw is there and not null."""
    return raw is not NOTHING and bytes(raw) != b"null"
