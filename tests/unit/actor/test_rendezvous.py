"""Rendezvous of all ranks at a store that is open from the start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch.distributed import Store

from recipe_gkd.actor.ranks import RankSpec, find_store, wait_for_all_ranks
from recipe_gkd.errors import DeadlineError
from recipe_gkd.weight_sync.store import open_store
from tests._support.errors import raises
from tests._support.ports import free_port


def rank_spec(rank: int, world_size: int, rendezvous: Store | tuple[str, int]) -> RankSpec:
    return RankSpec(rank=rank, world_size=world_size, local_rank=0, device="cpu", rendezvous=rendezvous)


class TestRendezvous:
    def test_wait_for_all_ranks_with_address_or_store_returns(self) -> None:
        store = open_store("127.0.0.1", 20)

        def join(rank: int) -> None:
            spec = rank_spec(rank, 3, store if rank == 0 else ("127.0.0.1", store.port))
            wait_for_all_ranks(find_store(spec, timeout_s=20), rank, 3, 20)

        with ThreadPoolExecutor(3) as ranks:
            list(ranks.map(join, range(3)))

    def test_wait_for_all_ranks_with_missing_ranks_names_them(self) -> None:
        store = open_store("127.0.0.1", 20)
        store.set("here/1", "")
        missing = ("actor rank 2 of 4", "actor rank 3 of 4")
        with raises(DeadlineError, worker="actor rank 0 of 4", missing=missing, waited_s=0.3):
            wait_for_all_ranks(store, 0, 4, 0.3)

    def test_find_store_without_listener_names_address(self) -> None:
        port = free_port()
        with raises(DeadlineError, worker="actor rank 1 of 2", missing=(), waited_s=1) as caught:
            find_store(rank_spec(1, 2, ("127.0.0.1", port)), timeout_s=1)
        assert f"127.0.0.1:{port}" in caught.value.what
