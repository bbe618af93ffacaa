from tests._support.fixtures import no_reward_process_remains

__all__ = ["no_reward_process_remains"]
