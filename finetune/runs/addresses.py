"""Addresses of files on other machines, by fsspec: s3://, gs://, hf://, https://, ..."""

import contextlib
from collections.abc import Iterator
from typing import Any

from finetune.errors import FinetuneError, first_line
from finetune.runs.run import SCHEME
from finetune.version import install

EXTRAS = {"s3": "s3", "s3a": "s3"}
"""The extra that has the library of an address."""


def is_address(word: object) -> bool:
    """Whether a word is an address, such as s3://bucket/run, rather than a path."""
    return isinstance(word, str) and SCHEME.match(word) is not None


def file_system(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path of the address in it; nothing is read.

    Raises:
        FinetuneError: its library is missing, or there is none.
    """
    import fsspec

    scheme = address.partition(":")[0]
    try:
        found: Any = fsspec.url_to_fs(address, use_listings_cache=False)
    except ImportError as error:
        advice = install(EXTRAS[scheme]) if scheme in EXTRAS else first_line(error)
        raise FinetuneError(f"{address}: its library is missing; {advice}") from None
    except ValueError as error:
        raise FinetuneError(f"{address}: {first_line(error)}") from None
    return found


@contextlib.contextmanager
def asking(address: str, problem: str, *known: type[OSError]) -> Iterator[None]:
    """Turn what a library raises that asks a server into a problem, but for `known` errors."""
    try:
        yield
    except known:
        raise
    except Exception as error:  # of botocore, google.auth, aiohttp, huggingface_hub, ...
        raise FinetuneError(f"{address}: {problem} ({first_line(error)})") from None
