"""The byte cache: the least recently used values of a kind make room, and bytes in use are not free."""

from __future__ import annotations

import threading

from subnetact.engine.cache import ByteCache


class Value:
    """A value that supports weak references."""


def test_the_least_recently_used_makes_room() -> None:
    cache = ByteCache(10)
    for key in "xyz":
        assert cache.put(key, Value(), 3, "a")
    assert isinstance(cache.get("x"), Value)
    assert cache.put("w", Value(), 3, "a")
    assert "y" not in cache
    assert {"x", "z", "w"} == {k for k in "xyzw" if k in cache}
    assert not cache.put("huge", Value(), 11, "a")
    assert not cache.put("b", Value(), 5, "b")
    cache.pin("z", True)
    assert cache.put("x2", Value(), 6, "a")
    assert "z" in cache
    assert cache.nbytes() == cache.nbytes("a") == 9
    assert not cache.grow("z", 2)
    assert "x2" in cache
    assert cache.grow("z", 1)
    assert cache.nbytes() == 10
    cache.drop("z")
    assert cache.nbytes() == 6
    cache.drop("x2")
    assert cache.nbytes() == 0


def test_what_is_in_use_is_not_free_yet() -> None:
    cache = ByteCache(10)
    cache.put("x", Value(), 8, "a")
    running = cache.get("x")
    assert not cache.make_room(5, "a")
    assert "x" not in cache
    assert not cache.put("y", Value(), 5, "a")
    assert cache.put("z", Value(), 2, "a")
    threading.Timer(0.05, lambda held=[running]: held.clear()).start()
    del running
    assert cache.make_room(5, "a", wait_s=30.0)
    assert "z" in cache
