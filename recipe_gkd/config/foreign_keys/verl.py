"""Keys of verl, and of its built-in distillation."""

from __future__ import annotations

from recipe_gkd.config.foreign_keys.entries import ANY, PACKED, RECOMPUTE, SERVICE, Project, other, same
from recipe_gkd.config.keys import ACTOR, LORA, MODEL, OPTIM, ROLLOUT, TEACHER

VERL = Project(
    name="verl",
    keys=(
        same(f"{ACTOR}.ppo_micro_batch_size_per_gpu", key=f"{ACTOR}.micro_batch_size"),
        same(
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            key=f"{ACTOR}.max_token_len",
            advice="tokens of all context-parallel ranks together",
        ),
        other(
            f"{ACTOR}.ppo_mini_batch_size",
            advice="remove it: each batch of `data.train_batch_size` prompts is one optimizer step",
        ),
        other(f"{ACTOR}.ppo_epochs", advice="remove it: each response is trained on once", fixed=("1",)),
        same(f"{ACTOR}.grad_clip", key=f"{OPTIM}.clip_grad"),
        same(f"{ACTOR}.clip_ratio_low", key="gkd.clip_ratio_low"),
        same(f"{ACTOR}.clip_ratio_high", key="gkd.clip_ratio_high"),
        same(f"{ACTOR}.clip_ratio_c", key="gkd.clip_ratio_c"),
        other(f"{ACTOR}.clip_ratio", advice="`gkd.clip_ratio_low` and `gkd.clip_ratio_high`"),
        same(f"{ACTOR}.loss_agg_mode", key="gkd.loss_agg_mode"),
        other(
            f"{ACTOR}.use_kl_loss",
            f"{ACTOR}.kl_loss_coef",
            f"{ACTOR}.kl_loss_type",
            "actor_rollout_ref.ref.*",
            "algorithm.use_kl_in_reward",
            "algorithm.kl_ctrl.*",
            advice="remove it: there is no reference policy; the KL divergence is with the teacher",
            fixed=("false",),
        ),
        other(
            f"{ACTOR}.entropy_coeff",
            advice="remove it: there is no entropy bonus; `actor/entropy` is a metric",
            fixed=("0", "0.0"),
        ),
        same(f"{MODEL}.lora_rank", key=f"{LORA}.rank"),
        same(f"{MODEL}.lora_alpha", key=f"{LORA}.alpha"),
        other(f"{MODEL}.target_modules", advice=f"`{LORA}.target_modules`, a list; null: all linear layers"),
        other(f"{MODEL}.use_remove_padding", advice=PACKED, fixed=ANY),
        other(f"{MODEL}.enable_gradient_checkpointing", advice=RECOMPUTE, fixed=("false",)),
        other(f"{ROLLOUT}.log_prob_*", advice=f"remove it: `{ACTOR}.max_token_len` limits all passes of the actor"),
        other(
            f"{ROLLOUT}.do_sample",
            advice=f"`{ROLLOUT}.temperature=0`: greedy decoding",
            fixed=("true",),
            values={"false": f"{ROLLOUT}.temperature=0"},
        ),
        other(
            f"{ROLLOUT}.val_kwargs.do_sample",
            advice=f"`{ROLLOUT}.val_kwargs.temperature` above 0; with 0, the default, decoding is greedy",
            values={"false": f"{ROLLOUT}.val_kwargs.temperature=0"},
        ),
        other(
            f"{ROLLOUT}.multi_turn.enable",
            f"{ROLLOUT}.multi_turn.tool_config_path",
            f"{ROLLOUT}.multi_turn.interaction_config_path",
            f"{ROLLOUT}.agent.custom_async_server.*",
            advice="`rollout.tools` (functions) or `rollout.environment` (a class); see docs/conversations.md",
            fixed=("false",),
        ),
        other(
            f"{ROLLOUT}.multi_turn.*",
            f"{ROLLOUT}.agent.*",
            advice="keys of section `rollout`, such as `rollout.max_turns`, `rollout.tool_parser` and "
            "`rollout.max_tool_response_length`",
            fixed=ANY,
        ),
        same(f"{ROLLOUT}.enable_rollout_routing_replay", key=f"{ROLLOUT}.routing_replay"),
        other(
            f"{ACTOR}.router_replay.mode",
            f"{ACTOR}.megatron.router_replay.mode",
            advice=f"`{ROLLOUT}.routing_replay=true`, which is R3; there is no R2",
            fixed=("disabled",),
            values={"r3": f"{ROLLOUT}.routing_replay=true"},
        ),
        same(f"{ROLLOUT}.engine_kwargs.vllm.async_scheduling", key=f"{ROLLOUT}.async_scheduling"),
        other(
            f"{ROLLOUT}.engine_kwargs",
            f"{ROLLOUT}.engine_kwargs.*",
            advice=f"the options of vLLM that can be set are keys of `{ROLLOUT}`",
            fixed=("false",),
        ),
        same(
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
            key=f"{ROLLOUT}.update_weights_bucket_megabytes",
        ),
        same("data.reward_fn_key", key="data.data_source_key"),
        other(
            "custom_reward_function.reward_kwargs",
            "custom_reward_function.reward_kwargs.*",
            advice="`custom_reward_function.kwargs`, the same mapping",
        ),
        other("data.tool_config_path", advice="`data.tools_key`: a column with the tools of each prompt"),
        other(
            f"{ROLLOUT}.load_format",
            f"{ACTOR}.use_torch_compile",
            f"{ACTOR}.shuffle",
            "data.tokenizer",
            "data.return_raw_chat",
            "data.return_raw_input_ids",
            "data.return_full_prompt",
            "data.val_batch_size",
            "data.dataloader_num_workers",
            "data.filter_overlong_prompts_workers",
            "trainer.balance_batch",
            "trainer.critic_warmup",
            "trainer.max_critic_ckpt_to_keep",
            "trainer.default_hdfs_dir",
            "trainer.del_local_ckpt_after_load",
            advice="remove it: nothing here needs it",
            fixed=ANY,
        ),
        same("algorithm.norm_adv_by_std_in_grpo", key="gkd.norm_adv_by_std"),
        other(
            "algorithm.adv_estimator",
            advice="`gkd.use_rl_loss=true` adds GRPO on the rewards; with `false` the run distills only",
        ),
        other(
            "algorithm.rollout_is*",
            "algorithm.rollout_correction.*",
            advice="`gkd.importance` and `gkd.importance_cap` for `k1`, `k2`, `k3`; other losses have no ratio",
        ),
        other(
            "algorithm.*",
            "critic.*",
            "reward_model.*",
            advice="remove it: there is no critic and no reward model; `custom_reward_function.path` scores responses",
        ),
        other(
            "trainer.val_only",
            advice="the command `python -m recipe_gkd evaluate FOLDER --data FILE`",
            fixed=("false",),
        ),
        other(
            "trainer.validation_data_dir",
            advice="remove it: `validation/` in the run folder has the responses",
        ),
        other(
            "trainer.rollout_data_dir",
            advice="remove it: only validation responses are written, to `validation/` in the run folder",
        ),
        same("trainer.profile_steps", key="trainer.profile.steps"),
        same("global_profiler.steps", key="trainer.profile.steps"),
        same("ray_kwargs.ray_init.num_cpus", key="ray_init.num_cpus"),
    ),
)

VERL_DISTILLATION = Project(
    name="verl distillation",
    keys=(
        same("distillation.enabled", key="gkd.enable_teacher"),
        same("distillation.teacher_key", key=f"{TEACHER}.route_key"),
        other(
            "distillation.teacher_models.*",
            advice=f"a teacher service for each model, and `{TEACHER}.teachers.NAME=host:port`",
        ),
        other("distillation.n_gpus_per_node", "distillation.nnodes", advice=SERVICE),
        other(
            "distillation.distillation_loss.loss_mode",
            advice="`gkd.distill_loss_type`: `k1`, `k2`, `k3`, or `forward_kl` for `forward_kl_topk`",
        ),
        same(
            "distillation.distillation_loss.topk", key=f"{TEACHER}.top_k", advice="at most the service's `N_LOGPROBS`"
        ),
        same("distillation.distillation_loss.kd_temperature", key="gkd.distill_temperature"),
        same("distillation.distillation_loss.distillation_loss_coef", key="gkd.distill_loss_coef"),
        other(
            "distillation.distillation_loss.use_policy_gradient",
            advice="`gkd.distill_loss_type=k1` is the policy gradient; the other losses are differentiated",
        ),
        other(
            "distillation.distillation_loss.use_task_rewards",
            advice="`gkd.use_rl_loss=true` with `gkd.rl_loss_coef`, and `custom_reward_function.path`",
        ),
        other("distillation.distillation_loss.*", advice="remove it: no loss is clamped or clipped per token"),
    ),
)
