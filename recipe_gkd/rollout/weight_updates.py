"""Which weights an engine has, whether it may generate with them, and the steps of an update.

    join -> receive -> commit        the new version
                    -> drop          the old version, or unfit if it may hold a mixture

Every function that takes the engine runs on the engine's thread (``RolloutEngine.run``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recipe_gkd.errors import WeightSyncError, WorkerDied
from recipe_gkd.weight_sync.bucket_plan import TensorMeta

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm_compat import LLMEngine


class WeightUpdates:
    """The state of one engine's weights."""

    def __init__(self, name: str, n_sharing: int = 1) -> None:
        """Create the state without a version.

        Args:
            name: Name of the worker, for errors.
            n_sharing: Receiving processes that share the memory of a host.
        """
        self.name, self._n_sharing = name, n_sharing
        self.unfit: str | None = "it has no weights version yet: a full weight sync must come first"
        """Why it may not generate."""
        self._received: int | None = None

    def ensure_valid(self) -> None:
        if self.unfit is not None:
            raise WeightSyncError(f"{self.name} refuses to generate: {self.unfit}")

    def set_version(self, engine: LLMEngine, version: int) -> None:
        """What the engine was started with counts as ``version``."""
        engine.set_weight_version(str(version))
        self.unfit = None

    def join(
        self, engine: LLMEngine, host: str, port: int, first_rank: int, labels: Sequence[str], transport: str,
        timeout_s: float,
    ) -> None:  # fmt: skip
        info = {
            "host": host,
            "port": port,
            "first_rank": first_rank,
            "labels": list(labels),
            "transport": transport,
            "timeout_s": timeout_s,
        }
        self._call(engine, "gkd_join_channel", info)

    def receive(
        self, engine: LLMEngine, version: int, meta: Sequence[TensorMeta], bucket_bytes: int, staged: bool | None
    ) -> dict[str, Any]:
        """Everything up to a verified checksum; statistics of the slowest worker of the engine."""
        self._received = None
        info = {
            "version": version,
            "meta": list(meta),
            "bucket_bytes": bucket_bytes,
            "staged": staged,
            "n_sharing": self._n_sharing,
        }
        outcomes = self._call(engine, "gkd_receive_weights", info)
        self._received = version
        return max(outcomes, key=lambda outcome: float(outcome["seconds"]))

    def commit(self, engine: LLMEngine, version: int) -> None:
        """From here on tokens are generated with, and stamped as, ``version``; of running requests, the next ones."""
        if self._received != version:
            self.drop(engine)
            raise WeightSyncError(f"{self.name} was asked to commit v{version}, but has received {self._received}")
        self._received = None
        self._call(engine, "gkd_commit_weights")
        self.unfit = "the prefix cache of the old weights could not be emptied"
        if not engine.reset_prefix_cache(reset_running_requests=True):  # they compute their cache anew, and go on
            self.ensure_valid()
        self.set_version(engine, version)

    def drop(self, engine: LLMEngine) -> None:
        """Give up an update, in whatever state it is; the channel is closed."""
        self._received = None
        self._call(engine, "gkd_drop_weights", reason="an update was given up")
        self._call(engine, "gkd_close_channel")

    def _call(self, engine: LLMEngine, method: str, *args: Any, reason: str | None = None) -> list[dict[str, Any]]:
        outcomes: list[dict[str, Any]] = engine.collective_rpc(method, args=args)
        errors = dict.fromkeys(outcome["error"] for outcome in outcomes if outcome["error"])
        if any(outcome["dirty"] for outcome in outcomes) and (errors or reason):
            self.unfit = self.unfit or (
                f"it may hold a mixture of weights, since {'; '.join(errors) or reason}; only a full weight sync on a "
                "new channel makes it fit again"
            )
        if errors:
            lost = any(outcome["device_is_lost"] for outcome in outcomes)
            raise (WorkerDied if lost else WeightSyncError)(f"{self.name}: {'; '.join(errors)}")
        return outcomes
