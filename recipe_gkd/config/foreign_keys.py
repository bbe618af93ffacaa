"""Keys of other projects, and what to write here instead. docs/migration.md has the same tables.

The names were read in public repositories between May and November 2026. After a change, write the tables with
``python -m recipe_gkd.config --migration``.
"""

from __future__ import annotations

from dataclasses import dataclass

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, TEACHER = "actor_rollout_ref.model", "actor_rollout_ref.teacher"
MEGATRON, FSDP, LORA = f"{ACTOR}.megatron", f"{ACTOR}.fsdp_config", f"{ACTOR}.lora"
OPTIM = f"{ACTOR}.optim"

_SERVICE = f"the teacher is a service of its own, started by `teacher/start_server.sh`; `{TEACHER}.server_ip` names it"
_PACKED = "remove it: sequences are always packed without padding"
_RECOMPUTE = (
    f"`{FSDP}.gradient_checkpointing`, or with Megatron `{MEGATRON}.override_transformer_config.recompute_granularity`"
)
_DTYPE = f"`{MEGATRON}.dtype` or `{FSDP}.dtype`, and `{ROLLOUT}.dtype`"
_BATCH = (
    f"`data.train_batch_size` is the number of prompts of an optimizer step, over all GPUs; `{ACTOR}.max_token_len` "
    "limits a micro-batch"
)


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """Keys of another project that have one answer.

    Attributes:
        names: Their names. An asterisk matches any part of a name.
        key: Our key with the same meaning and unit, with which an override is accepted. None if there is none.
        advice: What to write or to consider, as Markdown that reads well in a terminal.
    """

    names: tuple[str, ...]
    key: str | None = None
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Project:
    """Keys of one project, in the order of docs/migration.md.

    Attributes:
        name: Name of the project, which heads its table.
        keys: Rows of the table.
    """

    name: str
    keys: tuple[ForeignKey, ...]


def _same(name: str, key: str, advice: str = "") -> ForeignKey:
    return ForeignKey(names=(name,), key=key, advice=advice)


def _other(*names: str, advice: str) -> ForeignKey:
    return ForeignKey(names=names, advice=advice)


VERL_GKD = Project(
    name="verl gkd",
    keys=(
        _same("gkd.teacher_ip", f"{TEACHER}.server_ip"),
        _same("gkd.teacher_port", f"{TEACHER}.server_port"),
        _same("gkd.teacher_topk", f"{TEACHER}.top_k"),
        _same("gkd.teacher_n_server_workers", f"{TEACHER}.n_server_workers"),
        _same("gkd.teacher_num_microbatches", f"{TEACHER}.num_microbatches"),
        _other(f"{TEACHER}.overlap_rollout", advice="remove it: the teacher always scores while others generate"),
        _other(f"{TEACHER}.n_gpus_per_node", advice=_SERVICE),
        _other(
            f"{ACTOR}.distill_loss.name",
            advice="`gkd.distill_loss_type=forward_kl` for `kl`, `reverse_kl` for `rkl`, `kl_rkl` and `jsd`",
        ),
        _same(f"{ACTOR}.distill_loss.rkl_ratio", "gkd.rkl_ratio"),
        _same(f"{ACTOR}.distill_loss.beta", "gkd.beta"),
        _other(
            f"{MEGATRON}.dist_checkpointing_path",
            f"{MEGATRON}.use_dist_checkpointing",
            f"{MEGATRON}.use_mbridge",
            advice=f"remove it: the student is read from `{MODEL}.path`, a Hugging Face folder",
        ),
        _other(f"{ROLLOUT}.mode", advice="remove it: the engine is vLLM, and responses arrive one by one"),
        _other(
            f"{ROLLOUT}.free_cache_engine",
            advice=f"`{ROLLOUT}.sleep_level`, which is used with `actor_rollout_ref.hybrid_engine=true`",
        ),
    ),
)

VERL = Project(
    name="verl",
    keys=(
        _same(f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.micro_batch_size"),
        _same(
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            f"{ACTOR}.max_token_len",
            "tokens of all context-parallel ranks together",
        ),
        _other(
            f"{ACTOR}.ppo_mini_batch_size",
            advice="remove it: each batch of `data.train_batch_size` prompts is one optimizer step",
        ),
        _other(f"{ACTOR}.ppo_epochs", advice="remove it: each response is trained on once"),
        _same(f"{ACTOR}.grad_clip", f"{OPTIM}.clip_grad"),
        _same(f"{ACTOR}.clip_ratio_low", "gkd.clip_ratio_low"),
        _same(f"{ACTOR}.clip_ratio_high", "gkd.clip_ratio_high"),
        _same(f"{ACTOR}.clip_ratio_c", "gkd.clip_ratio_c"),
        _other(f"{ACTOR}.clip_ratio", advice="`gkd.clip_ratio_low` and `gkd.clip_ratio_high`"),
        _same(f"{ACTOR}.loss_agg_mode", "gkd.loss_agg_mode"),
        _other(
            f"{ACTOR}.use_kl_loss",
            f"{ACTOR}.kl_loss_coef",
            f"{ACTOR}.kl_loss_type",
            "actor_rollout_ref.ref.*",
            "algorithm.use_kl_in_reward",
            "algorithm.kl_ctrl.*",
            advice="remove it: there is no reference policy; the KL divergence is that of the teacher",
        ),
        _other(f"{ACTOR}.entropy_coeff", advice="remove it: there is no entropy bonus; `actor/entropy` is a metric"),
        _same(f"{MODEL}.lora_rank", f"{LORA}.rank"),
        _same(f"{MODEL}.lora_alpha", f"{LORA}.alpha"),
        _other(f"{MODEL}.target_modules", advice=f"`{LORA}.target_modules`, a list; null: all linear layers"),
        _other(f"{MODEL}.use_remove_padding", advice=_PACKED),
        _other(f"{MODEL}.enable_gradient_checkpointing", advice=_RECOMPUTE),
        _other(f"{ROLLOUT}.log_prob_*", advice=f"remove it: `{ACTOR}.max_token_len` limits all passes of the actor"),
        _other(
            f"{ROLLOUT}.do_sample",
            f"{ROLLOUT}.val_kwargs.do_sample",
            advice="`temperature=0` in the same section: greedy decoding, the default of `val_kwargs`",
        ),
        _other(f"{ROLLOUT}.multi_turn.*", f"{ROLLOUT}.agent.*", advice="remove it: each response is one turn"),
        _other(f"{ROLLOUT}.engine_kwargs.*", advice=f"the options of vLLM that can be set are keys of `{ROLLOUT}`"),
        _same(
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
            f"{ROLLOUT}.update_weights_bucket_megabytes",
        ),
        _same("data.reward_fn_key", "data.data_source_key"),
        _other(
            "custom_reward_function.reward_kwargs",
            "custom_reward_function.reward_kwargs.*",
            advice="`custom_reward_function.kwargs`, the same mapping",
        ),
        _other("data.tool_config_path", advice="`data.tools_key`: a column with the tools of each prompt"),
        _other(
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
        ),
        _same("algorithm.norm_adv_by_std_in_grpo", "gkd.norm_adv_by_std"),
        _other(
            "algorithm.adv_estimator",
            advice="`gkd.use_rl_loss=true` adds GRPO on the rewards; with `false` the run distills only",
        ),
        _other(
            "algorithm.rollout_is*",
            "algorithm.rollout_correction.*",
            advice="`gkd.importance` and `gkd.importance_cap` for `k1`, `k2`, `k3`; other losses have no ratio",
        ),
        _other(
            "algorithm.*",
            "critic.*",
            "reward_model.*",
            advice="remove it: there is no critic and no reward model; `custom_reward_function.path` scores responses",
        ),
        _same("trainer.profile_steps", "trainer.profile.steps"),
        _same("global_profiler.steps", "trainer.profile.steps"),
        _same("ray_kwargs.ray_init.num_cpus", "ray_init.num_cpus"),
    ),
)

VERL_DISTILLATION = Project(
    name="verl distillation",
    keys=(
        _same("distillation.enabled", "gkd.enable_teacher"),
        _same("distillation.teacher_key", f"{TEACHER}.route_key"),
        _other(
            "distillation.teacher_models.*",
            advice=f"a teacher service for each model, and `{TEACHER}.teachers.NAME=host:port`",
        ),
        _other("distillation.n_gpus_per_node", "distillation.nnodes", advice=_SERVICE),
        _other(
            "distillation.distillation_loss.loss_mode",
            advice="`gkd.distill_loss_type`: `k1`, `k2`, `k3`, or `forward_kl` for `forward_kl_topk`",
        ),
        _same("distillation.distillation_loss.topk", f"{TEACHER}.top_k", "at most the service's `N_LOGPROBS`"),
        _same("distillation.distillation_loss.kd_temperature", "gkd.distill_temperature"),
        _same("distillation.distillation_loss.distillation_loss_coef", "gkd.distill_loss_coef"),
        _other(
            "distillation.distillation_loss.use_policy_gradient",
            advice="`gkd.distill_loss_type=k1` is the policy gradient; the other losses are differentiated",
        ),
        _other(
            "distillation.distillation_loss.use_task_rewards",
            advice="`gkd.use_rl_loss=true` with `gkd.rl_loss_coef`, and `custom_reward_function.path`",
        ),
        _other("distillation.distillation_loss.*", advice="remove it: no loss is clamped or clipped per token"),
    ),
)

TRL = Project(
    name="TRL",
    keys=(
        _same("model_name_or_path", f"{MODEL}.path"),
        _other(
            "teacher_model_name_or_path",
            advice="`CKPT_PATH` of `teacher/start_server.sh`, or with "
            f"`{TEACHER}.backend=hf` the key `{TEACHER}.model_path`",
        ),
        _other(
            "teacher_model_server_url",
            "use_teacher_server",
            "teacher_model_init_kwargs",
            "teacher_model_revision",
            advice=f"`{TEACHER}.server_ip` and `{TEACHER}.server_port`: our own service, not an HTTP server",
        ),
        _other("lmbda", advice="`gkd.sft_share` = 1 - `lmbda`, with `gkd.sft_target=teacher`"),
        _other(
            "beta",
            advice="`gkd.distill_loss_type=jsd` with `gkd.beta`, the same formula; for 0 and 1 write "
            "`gkd.distill_loss_type=forward_kl` and `reverse_kl`",
        ),
        _other(
            "temperature",
            advice=f"two keys: `gkd.distill_temperature` for the loss, `{ROLLOUT}.temperature` for sampling",
        ),
        _other("seq_kd", advice="`gkd.sft_share=1`, with the teacher's responses in the column `data.response_key`"),
        _other("loss_top_k", advice=f"`{TEACHER}.top_k`, at most the service's `N_LOGPROBS`; null: all of them"),
        _other("loss_add_tail", advice="`gkd.tail=bucket` (default) for true, `renormalize` for false"),
        _other(
            "reward_funcs",
            "reward_weights",
            advice="`custom_reward_function.path`, or several weighted ones in `custom_reward_function.functions`",
        ),
        _same("max_new_tokens", "data.max_response_length"),
        _same("max_completion_length", "data.max_response_length"),
        _same("max_prompt_length", "data.max_prompt_length"),
        _other("max_length", advice="`data.max_prompt_length` and `data.max_response_length`"),
        _same("num_generations", f"{ROLLOUT}.n"),
        _same("top_p", f"{ROLLOUT}.top_p"),
        _same("top_k", f"{ROLLOUT}.top_k"),
        _other("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", advice=_BATCH),
        _same("learning_rate", f"{OPTIM}.lr"),
        _same("weight_decay", f"{OPTIM}.weight_decay"),
        _same("max_grad_norm", f"{OPTIM}.clip_grad"),
        _same("warmup_steps", f"{OPTIM}.lr_warmup_steps"),
        _same("warmup_ratio", f"{OPTIM}.lr_warmup_steps_ratio"),
        _other("lr_scheduler_type", advice=f"`{OPTIM}.lr_decay_style`: `constant`, `linear` or `cosine`"),
        _other("adam_beta1", "adam_beta2", advice=f"`{OPTIM}.betas`"),
        _same("num_train_epochs", "trainer.total_epochs"),
        _same("max_steps", "trainer.total_training_steps"),
        _same("save_steps", "trainer.save_freq"),
        _same("save_total_limit", "trainer.max_actor_ckpt_to_keep"),
        _same("eval_steps", "trainer.test_freq"),
        _same("output_dir", "trainer.default_local_dir"),
        _same("run_name", "trainer.experiment_name"),
        _other("resume_from_checkpoint", advice="`trainer.resume_mode` and `trainer.resume_from_path`"),
        _other("report_to", advice="`trainer.logger`, a list"),
        _same("seed", "data.seed"),
        _other("bf16", "fp16", advice=_DTYPE),
        _other("gradient_checkpointing", advice=_RECOMPUTE),
        _other("dataset_name", advice="`data.train_files`: parquet files on disk"),
        _other(
            "use_vllm",
            "vllm_mode",
            advice="remove it: vLLM always generates; `actor_rollout_ref.hybrid_engine=true` "
            "shares its devices with the actor",
        ),
        _same("vllm_gpu_memory_utilization", f"{ROLLOUT}.gpu_memory_utilization"),
        _same("vllm_tensor_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"),
        _same("vllm_max_model_length", f"{ROLLOUT}.max_model_len"),
        _other("max_staleness", advice="`trainer.scheduler=n_step_off` with `trainer.max_staleness`"),
        _same("use_fused_linear_loss", "gkd.fuse_lm_head"),
        _same("lora_r", f"{LORA}.rank"),
        _same("lora_alpha", f"{LORA}.alpha"),
        _same("lora_dropout", f"{LORA}.dropout"),
        _same("lora_target_modules", f"{LORA}.target_modules"),
        _other("disable_dropout", advice="remove it: the student is trained without dropout"),
    ),
)

NEMO_RL = Project(
    name="NeMo-RL",
    keys=(
        _same("distillation.num_prompts_per_step", "data.train_batch_size"),
        _same("distillation.num_generations_per_prompt", f"{ROLLOUT}.n"),
        _same("distillation.max_num_steps", "trainer.total_training_steps"),
        _same("distillation.max_num_epochs", "trainer.total_epochs"),
        _same("distillation.val_period", "trainer.test_freq"),
        _same("distillation.val_at_start", "trainer.val_before_train"),
        _same("distillation.topk_logits_k", f"{TEACHER}.top_k"),
        _same("distillation.seed", "data.seed"),
        _same("grpo.num_prompts_per_step", "data.train_batch_size"),
        _same("grpo.num_generations_per_prompt", f"{ROLLOUT}.n"),
        _same("grpo.max_num_steps", "trainer.total_training_steps"),
        _other("grpo.*", advice="`gkd.use_rl_loss=true` adds GRPO; its keys are in the section `gkd`"),
        _other("loss_fn.kl_type", advice="`gkd.distill_loss_type=forward_kl`, `reverse_kl` or, for `mixed`, `kl_rkl`"),
        _other("loss_fn.mixed_kl_weight", advice="`gkd.rkl_ratio` = 1 - `mixed_kl_weight`"),
        _other("loss_fn.zero_outside_topk", advice="`gkd.tail`"),
        _same("loss_fn.ratio_clip_min", "gkd.clip_ratio_low"),
        _same("loss_fn.ratio_clip_max", "gkd.clip_ratio_high"),
        _same("policy.model_name", f"{MODEL}.path"),
        _other("teacher.model_name", advice="`CKPT_PATH` of `teacher/start_server.sh`"),
        _other("policy.max_total_sequence_length", advice="`data.max_prompt_length` and `data.max_response_length`"),
        _other("policy.tokenizer.chat_template_kwargs*", advice="`data.apply_chat_template_kwargs`"),
        _other("policy.train_global_batch_size", advice=_BATCH),
        _same("policy.train_micro_batch_size", f"{ACTOR}.micro_batch_size"),
        _other("policy.precision", advice=_DTYPE),
        _same("policy.max_grad_norm", f"{OPTIM}.clip_grad"),
        _same("policy.optimizer.kwargs.lr", f"{OPTIM}.lr"),
        _same("policy.optimizer.kwargs.weight_decay", f"{OPTIM}.weight_decay"),
        _same("policy.megatron_cfg.optimizer.lr", f"{OPTIM}.lr"),
        _same("policy.megatron_cfg.optimizer.min_lr", f"{OPTIM}.min_lr"),
        *(
            _same(f"policy.megatron_cfg.{name}", f"{MEGATRON}.{name}")
            for name in (
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "context_parallel_size",
                "expert_model_parallel_size",
                "expert_tensor_parallel_size",
                "sequence_parallel",
            )
        ),
        _same("policy.dynamic_batching.enabled", f"{ACTOR}.use_dynamic_bsz"),
        _same("policy.dynamic_batching.train_mb_tokens", f"{ACTOR}.max_token_len"),
        _other("policy.sequence_packing.*", advice=_PACKED),
        _same("policy.generation.temperature", f"{ROLLOUT}.temperature"),
        _same("policy.generation.top_p", f"{ROLLOUT}.top_p"),
        _same("policy.generation.max_new_tokens", "data.max_response_length"),
        _same("policy.generation.vllm_cfg.tensor_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"),
        _same("policy.generation.vllm_cfg.gpu_memory_utilization", f"{ROLLOUT}.gpu_memory_utilization"),
        _same("policy.generation.vllm_cfg.max_model_len", f"{ROLLOUT}.max_model_len"),
        _same("policy.generation.vllm_cfg.enforce_eager", f"{ROLLOUT}.enforce_eager"),
        _other(
            "policy.generation.colocated.enabled",
            advice="`actor_rollout_ref.hybrid_engine=true` with `trainer.scheduler=sync`",
        ),
        _other(
            "policy.dtensor_cfg.*",
            advice=f"`{ACTOR}.strategy=fsdp` and the section `{FSDP}`",
        ),
        _same("checkpointing.checkpoint_dir", "trainer.default_local_dir"),
        _same("checkpointing.save_period", "trainer.save_freq"),
        _other("checkpointing.checkpoint_must_save_by", advice="`trainer.save_before`"),
        _other(
            "checkpointing.keep_top_k",
            "checkpointing.metric_name",
            advice="`trainer.max_actor_ckpt_to_keep` recent checkpoints, and the best by `trainer.best_metric`",
        ),
        _other(
            "cluster.num_nodes",
            "cluster.gpus_per_node",
            advice="`trainer.nnodes` and `trainer.n_gpus_per_node` "
            "for the actor, `rollout.nnodes` and `rollout.n_gpus_per_node` for the rollout engines",
        ),
        _other("logger.*", advice="`trainer.logger`, a list such as `[console,jsonl,wandb]`"),
        _other(
            "distillation.*",
            "policy.*",
            "loss_fn.*",
            "checkpointing.*",
            "env.*",
            advice="docs/migration.md lists the keys that have a counterpart here",
        ),
    ),
)

PROJECTS = (VERL_GKD, VERL, VERL_DISTILLATION, TRL, NEMO_RL)
