"""The table of places, what is refused, and the command that shows both."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from recipe_gkd import workers
from recipe_gkd.commands import check_devices as command
from recipe_gkd.config import load_config
from recipe_gkd.errors import ResourceError
from recipe_gkd.ray_cluster.placement import check_devices, device_report, placement_table

GIB = 1 << 30


def report(
    gpus: list[str], *, node: str = "a", given: list[str] | None = None, visible: list[str] | None = None
) -> dict[str, Any]:
    """Of a worker that sees the GPUs ``GPU-<n>`` of ``gpus``, which Ray gave it, unless told otherwise."""
    return dict(
        node=node,
        node_id=node * 40,
        node_ip="10.0.0.1",
        devices=[f"GPU-{gpu}" for gpu in gpus],
        device=", ".join(f"H200 GPU-{gpu}" for gpu in gpus) or "cpu",
        device_memory=len(gpus) * 141 * GIB,
        host_memory=512 * GIB,
        given=gpus if given is None else given,
        visible=gpus if visible is None else visible,
    )


def test_the_table_is_aligned_with_a_row_a_worker() -> None:
    reports = {f"actor worker {rank} of 62": report([str(rank % 8)], node="abcdefgh"[rank // 8]) for rank in range(62)}
    reports |= {f"rollout worker {rank} of 2": report(["6", "7"], node="i") for rank in range(2)}
    lines = placement_table(reports).splitlines()
    assert len(lines) == 65
    assert lines[0].split() == ["pool", "worker", "node", "device", "memory"]
    for title, cell in zip(
        ["worker", "node", "device", "memory"],
        ["0 of 2", "i 10.0.0.1 (iiiiiiii)", "H200 GPU-6, H200 GPU-7", "282.0 GiB GPU, 512.0 GiB host"],
        strict=True,
    ):
        assert lines[63].index(cell) == lines[0].index(title)


def test_two_workers_on_one_gpu_are_an_error_that_names_both() -> None:
    with pytest.raises(ResourceError, match=r"actor worker 0 and rollout worker 0 all got GPU-1 on node a 10.0.0.1"):
        check_devices({"actor worker 0": report(["1"]), "rollout worker 0": report(["1"])})
    check_devices({"actor worker 0": report(["1"]), "rollout worker 0": report(["1"], node="b")})
    check_devices({"actor worker 0": report([]), "rollout worker 0": report([])})


def test_shared_gpus_have_an_actor_and_a_rollout_worker_each() -> None:
    check_devices({"actor worker 0": report(["1"]), "rollout worker 0": report(["1"])}, shared=True)
    with pytest.raises(ResourceError, match="actor worker 0 and actor worker 1 all got GPU-1"):
        check_devices({"actor worker 0": report(["1"]), "actor worker 1": report(["1"])}, shared=True)
    with pytest.raises(ResourceError, match=r"has GPU-1 on node .* for itself"):
        check_devices({"actor worker 0": report(["1"]), "rollout worker 0": report(["2"])}, shared=True)


@pytest.mark.parametrize(
    "wrong",
    [
        report(["0", "1"], given=["1"]),  # more than it was given
        report(["0"], given=["1"], visible=["0"]),  # another one
        report(["0"], given=["0", "1"]),  # fewer
        report(["0"], given=[], visible=["0"]),
    ],
)
def test_a_worker_that_sees_other_gpus_than_ray_gave_it_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ResourceError, match=r"actor worker 0 on node .*Ray gave it GPU .* CUDA_VISIBLE_DEVICES"):
        check_devices({"actor worker 0": wrong})


def test_without_ray_a_place_is_known_all_the_same() -> None:
    place = device_report("cpu")
    assert place["device"] == "cpu" and place["host_memory"] > 0 and place["pid"]
    check_devices({"a": place | {"given": None}})


class Crowded:
    """A worker on the one GPU that all have, where no engine would start."""

    def __init__(self, **_: object) -> None:
        pass

    def where(self) -> dict[str, Any]:
        return report(["0"])

    def rendezvous(self) -> None:
        raise MemoryError

    def setup(self) -> None:
        raise MemoryError

    def shutdown(self) -> None:
        pass


@pytest.mark.usefixtures("ray_session")
def test_workers_on_one_gpu_are_shown_and_named_before_their_engines_start_and_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "ActorWorker", Crowded)
    monkeypatch.setattr(workers, "RolloutWorker", Crowded)
    config = load_config("on_policy_distill_trainer", ["data.train_files=x", "actor_rollout_ref.model.path=x"])

    async def start() -> None:
        async with workers.start_workers(config, "cpu", total_steps=1, stop_token_ids=(), n_tokens=None):
            pass

    with (
        caplog.at_level("INFO", "recipe_gkd.workers"),
        pytest.raises(ResourceError, match="actor worker 0 of 1 and rollout worker 0 of 1 all got GPU-0"),
    ):
        asyncio.run(start())
    assert caplog.text.count("H200 GPU-0") == 2


def test_the_command_refuses_what_the_cluster_has_not_and_a_wrong_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["trainer.n_gpu_per_node=2"]) == 1
    assert "did you mean trainer.n_gpus_per_node" in capsys.readouterr().err
