"""A known prefix is a known history: nothing else may look like it."""

from pagefold.kv.pool import PagePool
from pagefold.kv.prefix import PrefixCache


def cache_with(tokens: tuple[int, ...], salt: str = "") -> PrefixCache:
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=len(tokens))
    cache.insert(cache.root(salt), tokens, pool.take(1, reserved=False))
    return cache


def hits(cache: PrefixCache, tokens: tuple[int, ...], salt: str = "") -> int:
    return len(cache.match(salt, list(tokens), limit=len(tokens))[0])


def test_case_46_a_collision_of_keys_is_a_miss(monkeypatch):
    """All pages get one key: tokens are compared, so nobody is given a stranger's rows."""
    monkeypatch.setattr(PrefixCache, "key", staticmethod(lambda parent, tokens: b"same"))
    cache = cache_with((1, 2))
    assert hits(cache, (1, 2)) == 1
    assert hits(cache, (1, 3)) == 0
    assert hits(cache, (1, 2), salt="other") == 0  # the parent is compared, too


def test_case_46_what_a_salt_says_is_no_other_part_of_a_key():
    """A salt that spells the bytes of a key, or of a token, leads nowhere else."""
    cache = cache_with((1, 2), salt="a")
    for salt in ("", "a\0", "root\0a", "\x01", PrefixCache.root("a").hex()):
        assert hits(cache, (1, 2), salt) == 0
    assert hits(cache, (1, 2), "a") == 1
