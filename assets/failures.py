"""How a launch that cannot do what it was asked for says so: in one sentence, and without a retry."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg
from pydantic import ValidationError

from batch_pipeline.errors import BatchPipelineError, NotFound, StoreError
from batch_pipeline.plain import one_line

_MOST_CHARACTERS = 1000


class LaunchConfig(dg.Config):
    """What an operator may ask for. Dagster refuses a wrong field or type before the launch, but not a value out of
    bounds: that ends the run before it has changed anything.
    """

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            wrong = "; ".join(_in_words(one["loc"], one["input"], one["msg"]) for one in error.errors())
            raise dg.Failure(
                f"the config of this launch cannot be used, and nothing was changed: {wrong}", allow_retries=False
            ) from None


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """End a run with what our errors say: trying again would find the same. An outage of the store is another thing,
    and stays an error that may be retried.
    """
    try:
        yield
    except StoreError:
        raise
    except BatchPipelineError as error:
        more = ". The key of a partition is a batch's id: this one is none" if isinstance(error, NotFound) else ""
        raise dg.Failure(f"{one_line(str(error), _MOST_CHARACTERS)}{more}", allow_retries=False) from error


def _in_words(where: tuple[int | str, ...], given: object, message: str) -> str:
    text = message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, where))} is {given}: {text[0].lower()}{text[1:]}" if where else text
