"""When pages run short: who, in pressure mode, is asked to fold."""

from pagefold.engine.sequence import Sequence
from pagefold.kv.manager import KVManager
from pagefold.kv.state import FoldPolicy, KVState


class Pressure:
    """Watches the pages for requests in pressure mode, which keep every row until they are asked to fold.

    While memory is ample a step pays one comparison for it, whatever the batch.
    """

    def __init__(self, manager: KVManager):
        self.manager = manager
        self._reach = 0  # the longest met, `_reach_of`; 0 until there is somebody to ask

    def meet(self, policy: FoldPolicy) -> None:
        """A request with this policy has come."""
        if policy.under_pressure:
            self._reach = max(self._reach, self._reach_of(policy))

    def relieve(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """If pages run short, ask the longest requests to fold, until what they will free is enough for all that run
        and for the first that waits."""
        if not self._reach:
            return
        manager, num_groups, for_next = self.manager, self.manager.geometry.num_groups, 0
        if waiting:
            for_next = -(-len(waiting[0].tokens) // manager.geometry.page_size) * num_groups
        if manager.room() >= len(running) * num_groups * self._reach + for_next:
            return  # whoever they are
        free_riders = [s.kv for s in running if not s.kv.reserved]
        unasked = [kv for kv in free_riders if kv.policy.under_pressure and kv.fold_from is None]
        if not unasked:
            return
        want = len(free_riders) * num_groups * max(self._reach_of(kv.policy) for kv in unasked) + for_next
        coming = sum(self._surplus(kv) for kv in free_riders if kv.fold_from is not None)
        for kv in sorted(unasked, key=lambda kv: kv.num_tokens, reverse=True):
            if manager.room() + coming >= want or self._surplus(kv) <= 0:
                return
            manager.start_folding(kv)
            coming += self._surplus(kv)

    def _reach_of(self, policy: FoldPolicy) -> int:
        """Pages that a group may open before a fold that is asked for now is done."""
        return -(-(policy.lead + policy.period) // self.manager.geometry.page_size)

    def _surplus(self, kv: KVState) -> int:
        """Pages that the next fold gives back."""
        pages = (kv.policy.budget + kv.policy.period) // self.manager.geometry.page_size
        return int((kv.num_pages - pages).clip(0).sum())
