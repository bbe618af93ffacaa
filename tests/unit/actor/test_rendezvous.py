"""All ranks meet at a store that is open from the start; who does not come is named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from recipe_gkd.actor.parallel import find_store, meet
from recipe_gkd.errors import DeadlineError
from recipe_gkd.weight_sync.transport import open_store
from tests._support.ports import free_port

pytestmark = pytest.mark.timeout(60)


def test_ranks_with_the_address_meet_the_rank_that_holds_the_store() -> None:
    store = open_store("127.0.0.1", 20)

    def come(rank: int) -> None:
        found = store if rank == 0 else find_store(("127.0.0.1", store.port), rank=rank, world_size=3, timeout_s=20)
        meet(found, rank, 3, 20)

    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(come, range(3)))


def test_rank_that_does_not_come_is_named() -> None:
    store = open_store("127.0.0.1", 20)
    store.set("here/1", "")
    with pytest.raises(DeadlineError, match=r"^actor rank 0 of 4: rank 2, 3 did not come to the meeting of all ranks"):
        meet(store, 0, 4, 0.3)


def test_address_where_nobody_listens_is_named() -> None:
    port = free_port()
    with pytest.raises(DeadlineError, match=rf"^actor rank 1 of 2: not all ranks met at 127.0.0.1:{port} within 1 s"):
        find_store(("127.0.0.1", port), rank=1, world_size=2, timeout_s=1)
