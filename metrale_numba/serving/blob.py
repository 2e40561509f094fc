"""A blob as it lies in a file or in Redis: a head that says whose bytes follow, and how they must look.

A head is a magic, the format version, two lengths, a checksum, and the whole store key. Whoever reads a blob compares
the key before using a byte of it, so no name that is found for a blob need be trusted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from metrale_numba.serving.tier import StoreKey

FORMAT_VERSION: Final = 1
_MAGIC: Final = b"METRSNAP"
# Magic, format version, bytes of the key, bytes of the payload, BLAKE2b of the three numbers, the key and the payload.
_FIXED: Final = struct.Struct("<8sIQQ32s")
_NUMBERS: Final = struct.Struct("<IQQ")
# Rank, adapter, key, check, bytes of the model, bytes of the dtype; the two follow.
_KEY: Final = struct.Struct("<6Q")
#: As much as the head of nearly every blob has.
USUAL_HEAD_BYTES: Final = 512


class Head(NamedTuple):
    """What a blob says of itself.

    Attributes
    ----------
    key : StoreKey
        Whose bytes they are.
    name : str
        The key's :func:`blob_name`.
    num_bytes : int
        Bytes of the head; the payload begins there.
    payload_bytes : int
        Bytes of the payload.
    checksum : bytes
        What :func:`is_intact` compares.
    """

    key: StoreKey
    name: str
    num_bytes: int
    payload_bytes: int
    checksum: bytes


def blob_name(key: StoreKey) -> str:
    """Give the name of a key's blob: 64 hexadecimal digits, whatever the key holds."""
    return _name_of(_key_bytes(key))


def encode_head(key: StoreKey, payload: memoryview) -> bytes:
    """Give the head that goes before `payload`."""
    text = _key_bytes(key)
    checksum = _checksum(text, payload)
    return _FIXED.pack(_MAGIC, FORMAT_VERSION, len(text), payload.nbytes, checksum) + text


def decode_head(read: Callable[[int], bytes], num_bytes: int) -> Head | None:
    """Read the head of a blob of `num_bytes` bytes.

    Parameters
    ----------
    read : callable
        Gives the first so many bytes of the blob.
    num_bytes : int
        What the whole blob has.

    Returns
    -------
    Head or None
        None if it is damaged, foreign, or of another format. All but the payload has been checked otherwise.
    """
    data = read(USUAL_HEAD_BYTES)
    if len(data) < _FIXED.size:
        return None
    magic, version, key_bytes, payload_bytes, checksum = _FIXED.unpack_from(data)
    head_bytes = _FIXED.size + key_bytes
    if magic != _MAGIC or version != FORMAT_VERSION or head_bytes + payload_bytes != num_bytes:
        return None
    if head_bytes > len(data):
        data = read(head_bytes)
    text = data[_FIXED.size : head_bytes]
    key = _key_of(text) if len(text) == key_bytes else None
    return None if key is None else Head(key, _name_of(text), head_bytes, payload_bytes, checksum)


def is_intact(head: Head, payload: memoryview) -> bool:
    """Whether `payload` is what `head` was written for."""
    return payload.nbytes == head.payload_bytes and _checksum(_key_bytes(head.key), payload) == head.checksum


def _checksum(text: bytes, payload: memoryview) -> bytes:
    digest = hashlib.blake2b(_NUMBERS.pack(FORMAT_VERSION, len(text), payload.nbytes), digest_size=32)
    digest.update(text)
    digest.update(payload)
    return digest.digest()


def _name_of(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=32).hexdigest()


def _key_bytes(key: StoreKey) -> bytes:
    # A str can hold halves of surrogate pairs, as file names that are no UTF-8 do.
    model, dtype = key.model.encode(errors="surrogatepass"), key.dtype.encode(errors="surrogatepass")
    return _KEY.pack(key.rank, key.adapter, key.key, key.check, len(model), len(dtype)) + model + dtype


def _key_of(text: bytes) -> StoreKey | None:
    if len(text) < _KEY.size:
        return None
    rank, adapter, key, check, model_bytes, dtype_bytes = _KEY.unpack_from(text)
    if _KEY.size + model_bytes + dtype_bytes != len(text):
        return None
    middle = _KEY.size + model_bytes
    try:
        model = text[_KEY.size : middle].decode(errors="surrogatepass")
        dtype = text[middle:].decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return None
    return StoreKey(model, dtype, rank, adapter, key, check)
