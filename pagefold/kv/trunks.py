"""What a folded request leaves behind when it ends: its rows under its tokens, for requests that go on from there."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagefold.core.types import Move, SwapOp
from pagefold.kv.pool import PagePool
from pagefold.kv.state import KVState, RowCounts, pages_of_tier, tier_mask

BLOCK = 256  # tokens that are hashed at a time when a trunk is looked for

Root = tuple[str, str]  # a request's salt, and its policy's ask


@dataclass(eq=False)
class Trunk:
    """Rows of a request that ended, and that others may grow from.

    root        who may: requests with this salt that ask for this folding
    tokens      those whose rows these are
    counts      what folding left of them; a request must share `counts.fixed` tokens at least, and what is stored
                beyond those it shares is cut off
    pages       int32[G, n] page ids, in the pool or in host memory; [0, num_pages[g]) are valid
    num_compactions   that made it what it is
    on_host     the pages are host pages
    growths     requests that grew from it
    spent       the only one of these ended, and left a trunk of its own
    """

    root: Root
    tokens: tuple[int, ...]
    counts: RowCounts
    pages: np.ndarray
    num_pages: np.ndarray
    num_compactions: int
    on_host: bool = False
    growths: int = 0
    spent: bool = False

    def tier_pages(self, tier: int) -> np.ndarray:
        return pages_of_tier(tier, self.pages, self.num_pages, self.counts.cold)

    def shared(self, tokens: tuple[int, ...]) -> int:
        """How many of its tokens `tokens` begins with; 0 if that is not enough to grow from."""
        fixed, most = self.counts.fixed, min(len(self.tokens), len(tokens))
        if most < fixed or tokens[fixed - 1] != self.tokens[fixed - 1] or tokens[:fixed] != self.tokens[:fixed]:
            return 0
        if tokens[fixed:most] == self.tokens[fixed:most]:
            return most
        return next(i for i in range(fixed, most) if tokens[i] != self.tokens[i])


@dataclass
class _Node:
    """A known beginning: how many trunks begin so, and those whose fixed part ends before the next block is full."""

    passing: int = 0
    trunks: list[Trunk] = field(default_factory=list)


class Trunks:
    """The trunks there are, least recently used first.

    A trunk's pages are idle pages of the pool: whoever needs them gets them. The trunk then moves to host memory, if
    there is room within `num_host_pages` per tier, else it is forgotten. In host memory the least recently used ones
    are forgotten, for others or for a request that is swapped out.

    In a chat, the trunk of one turn is never needed again once the next turn has left its own, which shares most of its
    pages or was made from them. So a trunk that one request grew from goes first, and is not worth a move; with the
    second request it has branches, and counts as used by each.

    A trunk is found by a chain of hashes over blocks of tokens, and then compared token by token.

    copies   the moves that were decided on and are not yet part of a plan; others add theirs, for their order matters
    """

    def __init__(self, pools: list[PagePool], host_pools: list[PagePool], num_host_pages: Sequence[int]):
        self.pools = pools
        self.host_pools = host_pools
        self.num_host_pages = num_host_pages
        self.copies: list[SwapOp] = []
        self.changes = 0  # a number that changes whenever a search may find something else
        self._here: OrderedDict[Trunk, None] = OrderedDict()
        self._hosted: OrderedDict[Trunk, None] = OrderedDict()
        self._nodes: dict[int, _Node] = {}

    def __iter__(self):
        yield from self._here
        yield from self._hosted

    def __len__(self) -> int:
        return len(self._here) + len(self._hosted)

    # ---- finding and remembering

    @staticmethod
    def _keys(root: Root, tokens: tuple[int, ...]):
        """Keys of the beginnings of 0, BLOCK, 2 * BLOCK, ... tokens."""
        key = hash(root)
        yield key
        for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            key = hash((key, tokens[start : start + BLOCK]))
            yield key

    def find(self, root: Root, tokens: Sequence[int]) -> tuple[Trunk, int] | None:
        """The trunk that shares most tokens with `tokens`, and how many; None if there is none to grow from."""
        if not self._nodes:
            return None
        ids, best, most = tuple(tokens), None, 0
        for key in self._keys(root, ids):
            node = self._nodes.get(key)
            if node is None:
                break
            for trunk in node.trunks:
                if trunk.root == root and (shared := trunk.shared(ids)) > most:
                    best, most = trunk, shared
        return best and (best, most)

    def keep(self, kv: KVState, tokens: Sequence[int], salt: str) -> None:
        """Remember a folded sequence that ended and stored `tokens`; its pages are still held."""
        root, ids = (salt, kv.policy.ask), tuple(tokens)
        found = self.find(root, ids)
        if found and len(found[0].tokens) == found[1] == len(ids):
            self._touch(found[0])  # a twin said the same
        else:
            num_pages = -(-(len(ids) - kv.evicted) // kv.page_size)
            pages = kv.pages[:, : int(num_pages.max())].copy()
            counts = RowCounts(kv.evicted, kv.cold, kv.fixed)
            trunk = Trunk(root, ids, counts, pages, num_pages, kv.num_compactions)
            for tier, pool in enumerate(self.pools):
                pool.remember(trunk.tier_pages(tier))
            self._here[trunk] = None
            self._enter(trunk)
        before = kv.trunk
        if before is not None and before.growths == 1 and before in (order := self._order(before)):
            before.spent = True
            order.move_to_end(before, last=False)

    def _fixed_keys(self, trunk: Trunk):
        return self._keys(trunk.root, trunk.tokens[: trunk.counts.fixed])

    def _enter(self, trunk: Trunk) -> None:
        node = None
        for key in self._fixed_keys(trunk):
            node = self._nodes.setdefault(key, _Node())
            node.passing += 1
        assert node is not None
        node.trunks.append(trunk)
        self.changes += 1

    def _leave(self, trunk: Trunk) -> None:
        for key in self._fixed_keys(trunk):
            node = self._nodes[key]
            node.passing -= 1
            if trunk in node.trunks:
                node.trunks.remove(trunk)
            if not node.passing:
                del self._nodes[key]
        self.changes += 1

    def grow(self, trunk: Trunk) -> None:
        """A request grows from it."""
        trunk.growths += 1
        if trunk.growths > 1:
            trunk.spent = False
            self._touch(trunk)

    def _order(self, trunk: Trunk) -> OrderedDict[Trunk, None]:
        return self._hosted if trunk.on_host else self._here

    def _touch(self, trunk: Trunk) -> None:
        self._order(trunk).move_to_end(trunk)

    # ---- giving way

    def make_room(self, tier: int, num_free: int) -> None:
        """Move or forget trunks, least recently used first, until the pool has `num_free` free pages."""
        pool = self.pools[tier]
        for trunk in list(self._here):
            if pool.num_free >= num_free:
                return
            if (pool.refs[trunk.tier_pages(tier)] == 0).any():  # else it is in use: to forget it frees nothing
                self._give_way(trunk)

    def _give_way(self, trunk: Trunk) -> None:
        """Out of the pool: to host memory if it fits there and is not spent, else forgotten."""
        device = [trunk.tier_pages(tier) for tier in range(len(self.pools))]
        moves = not trunk.spent and self._host_room([len(pages) for pages in device])
        del self._here[trunk]
        for pool, pages in zip(self.pools, device, strict=True):
            pool.forget(pages)
        if not moves:
            self._leave(trunk)
            return
        table = np.zeros_like(trunk.pages)
        for tier, (pool, pages) in enumerate(zip(self.host_pools, device, strict=True)):
            host = pool.take(len(pages), False)
            pool.remember(host)
            pool.drop(host, False)
            if len(pages):
                self.copies.append(SwapOp(tier, Move.OUT, pages, host))
            table[tier_mask(tier, table.shape[1], trunk.num_pages, trunk.counts.cold)] = host
        trunk.pages, trunk.on_host = table, True
        self._hosted[trunk] = None

    def _host_room(self, need: list[int]) -> bool:
        """Whether so many host pages per tier are free now, others having been forgotten for them."""
        if any(n > most for n, most in zip(need, self.num_host_pages)):
            return False
        for tier, (pool, n) in enumerate(zip(self.host_pools, need, strict=True)):
            while pool.num_idle + n > self.num_host_pages[tier] and self._hosted:
                self._forget_hosted()
            self.make_host_room(tier, n)
        return all(
            pool.num_free >= n and pool.num_idle + n <= most
            for pool, n, most in zip(self.host_pools, need, self.num_host_pages)
        )

    def make_host_room(self, tier: int, num_free: int) -> None:
        """Forget trunks in host memory until `num_free` of its pages are free, or none is left."""
        while self._hosted and self.host_pools[tier].num_free < num_free:
            self._forget_hosted()

    def _forget_hosted(self) -> None:
        trunk, _ = self._hosted.popitem(last=False)
        for tier, pool in enumerate(self.host_pools):
            pool.forget(trunk.tier_pages(tier))
        self._leave(trunk)

    def count_memories(self, tier: int, on_host: bool) -> np.ndarray:
        """int32[pages]: how many trunks name each page of the pool, or of host memory."""
        counts = np.zeros((self.host_pools if on_host else self.pools)[tier].num_pages, np.int32)
        for trunk in self._hosted if on_host else self._here:
            np.add.at(counts, trunk.tier_pages(tier), 1)
        return counts

    def clear(self) -> None:
        """Forget all of them."""
        for trunk in self:
            for tier, pool in enumerate(self.host_pools if trunk.on_host else self.pools):
                pool.forget(trunk.tier_pages(tier))
        self._here.clear()
        self._hosted.clear()
        self._nodes.clear()
        self.changes += 1
