"""Masks of a secure sum: agreed between pairs of clients, expanded by a stream cipher, added modulo 2^bits.

Keys come from X25519 and are derived by HKDF with run, round and both names, so that even a key used twice by mistake
gives other masks in another round or for another pair. A derived key encrypts one stream, once: a fixed nonce is safe.
"""

from __future__ import annotations

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from polyeps.secagg.messages import SumSetup

KEY_BYTES = 32
# What an encryption adds to a text.
TAG_BYTES = 16
Words = NDArray[np.unsignedinteger]


def private_key(secret: bytes) -> X25519PrivateKey:
    """Return the key of 32 secret bytes; making it takes as long as using it, so make it once for all others."""
    return X25519PrivateKey.from_private_bytes(secret)


def public_key(secret: bytes) -> bytes:
    """Return the public half of an X25519 key."""
    return private_key(secret).public_key().public_bytes_raw()


def agree(private: X25519PrivateKey, other: bytes) -> bytes:
    """Return the secret that two holders share, to derive keys from; ValueError if the other's key is invalid."""
    # An exchange that comes to zero, as with a point of small order, is refused by the library.
    return private.exchange(X25519PublicKey.from_public_bytes(other))


def check_public(key: bytes) -> None:
    """Raise ValueError if a public key is of small order, and so leads to the same secret with all clients."""
    agree(private_key(bytes(KEY_BYTES)), key)


def derive(secret: bytes, context: bytes) -> bytes:
    """Return a key for one purpose from a secret."""
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=context).derive(secret)


def encrypt(key: bytes, text: bytes, context: bytes) -> bytes:
    """Return a text that only the other holder of the key can read, and only in this context."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, context)


def decrypt(key: bytes, content: bytes, context: bytes) -> bytes | None:
    """Return the text that was encrypted, or None if it was not under this key and in this context."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), content, context)
    except InvalidTag:
        return None


def self_mask_key(setup: SumSetup, name: str, seed: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return derive(seed, setup.context("self mask", name, name))


def commitment(setup: SumSetup, name: str, seed: bytes) -> bytes:
    """Return a client's commitment to its seed, so that wrong shares of it are noticed."""
    return derive(seed, setup.context("commitment", name, name))


def pair_mask_key(setup: SumSetup, one: str, other: str, secret: bytes) -> bytes:
    """Return the key of the mask of a pair, the same for both. The lesser name adds it, the other subtracts it."""
    return derive(secret, setup.context("pair mask", min(one, other), max(one, other)))


def word(bits: int) -> np.dtype[np.unsignedinteger]:
    """Return the type masks are added in: 2^bits divides its modulus, so upper bits are cut off once, at the end."""
    return np.dtype("<u4") if bits <= 32 else np.dtype("<u8")


class Masking:
    """A vector of words on which masks are put, or from which they are taken, in place."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self._zeros = bytes(words.nbytes)
        self._stream = np.empty_like(words)

    def put(self, key: bytes, *, plus: bool = True) -> None:
        """Add the mask that a key expands to, or subtract it."""
        (np.add if plus else np.subtract)(self.words, self._expanded(key), out=self.words)

    def _expanded(self, key: bytes) -> Words:
        encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        encryptor.update_into(self._zeros, self._stream.data.cast("B"))
        return self._stream


def cut(total: Words, bits: int) -> Words:
    """Return words modulo 2^bits, in place."""
    total &= total.dtype.type(2**bits - 1)
    return total


def bytes_of(bits: int) -> int:
    """Return the number of bytes that hold a word below 2^bits."""
    return -(-bits // 8)


def to_bytes(vector: Words, bits: int) -> bytes:
    """Return words below 2^bits as the fewest whole bytes each, lowest first."""
    return vector.view(np.uint8).reshape(len(vector), -1)[:, : bytes_of(bits)].tobytes()


def from_bytes(content: bytes, bits: int) -> Words:
    """Return the words that some bytes stand for; the caller has checked their number."""
    width = bytes_of(bits)
    words = np.zeros((len(content) // width, word(bits).itemsize), np.uint8)
    words[:, :width] = np.frombuffer(content, np.uint8).reshape(-1, width)
    return words.view(word(bits))[:, 0]
