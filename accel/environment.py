"""The process environment, the one contract between a launcher and the runtime, read into values and checked.

Pure: every function takes the mapping it reads, imports no torch, and has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accel.errors import ArgumentError, WorldError

_TRUE = frozenset({"1", "true", "yes", "y", "on", "t"})
_FALSE = frozenset({"", "0", "false", "no", "n", "off", "f"})


@dataclass(frozen=True, kw_only=True)
class World:
    """Which process this is, among how many."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None


def read_flag(env: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Read a yes or a no. Raises `ArgumentError` for anything that is neither."""
    text = env.get(name)
    if text is None:
        return default
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ArgumentError(f"environment variable {name}={text!r} is neither yes nor no: use 1 or 0")


def read_int(env: Mapping[str, str], name: str, *, minimum: int) -> int | None:
    """Read a whole number of at least ``minimum``; ``None`` when the variable is not set."""
    text = env.get(name)
    if text is None or not text.strip():
        return None
    try:
        value = int(text)
    except ValueError:
        raise WorldError(f"environment variable {name}={text!r} is not a whole number") from None
    if value < minimum:
        raise WorldError(f"environment variable {name}={value} is less than {minimum}")
    return value


def read_world(env: Mapping[str, str], *, needs_master: bool = True) -> World:
    """Read torchrun's variables; ``MASTER_ADDR`` and ``MASTER_PORT`` only if ``needs_master``.

    Without ``WORLD_SIZE``, or with ``WORLD_SIZE=1``, the world is this process alone. Anything that says "one of many"
    without saying which one raises `WorldError`: N processes must never become N worlds of one.
    """
    size = read_int(env, "WORLD_SIZE", minimum=1)
    rank = read_int(env, "RANK", minimum=0)
    if size is None and rank is not None and rank > 0:
        raise WorldError(f"RANK={rank} is set but WORLD_SIZE is not: set both, or start with `accel launch`")
    size = size or 1
    if size == 1:
        return _alone(env, rank)
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if needs_master else ("RANK",)
    missing = [name for name in needed if not env.get(name, "").strip()]
    if missing:
        names = ", ".join(missing)
        raise WorldError(f"WORLD_SIZE={size} but {names} not set: start with `accel launch` or torchrun")
    assert rank is not None
    if rank >= size:
        raise WorldError(f"RANK={rank} is not below WORLD_SIZE={size}")
    return _one_of_many(env, rank, size)


def _alone(env: Mapping[str, str], rank: int | None) -> World:
    if rank:
        raise WorldError(f"RANK={rank} is not below WORLD_SIZE=1")
    return World(local_rank=read_int(env, "LOCAL_RANK", minimum=-1) or 0)


def _one_of_many(env: Mapping[str, str], rank: int, size: int) -> World:
    local_rank = read_int(env, "LOCAL_RANK", minimum=0)
    local_size = read_int(env, "LOCAL_WORLD_SIZE", minimum=1)
    if local_rank is None:
        if local_size is not None and local_size != size:
            raise WorldError(f"LOCAL_WORLD_SIZE={local_size} of WORLD_SIZE={size} but LOCAL_RANK not set")
        local_rank = rank
    if local_size is not None and local_rank >= local_size:
        raise WorldError(f"LOCAL_RANK={local_rank} is not below LOCAL_WORLD_SIZE={local_size}")
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size or size,
        master_addr=env.get("MASTER_ADDR"),
        master_port=read_int(env, "MASTER_PORT", minimum=0),
    )
