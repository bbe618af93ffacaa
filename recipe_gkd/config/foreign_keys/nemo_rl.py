"""Keys of NeMo-RL's ``distillation_math.yaml``."""

from __future__ import annotations

from recipe_gkd.config.foreign_keys.entries import ANY, BATCH, DTYPE, PACKED, Project, other, same
from recipe_gkd.config.keys import ACTOR, FSDP, MEGATRON, MODEL, OPTIM, ROLLOUT, TEACHER

NEMO_RL = Project(
    name="NeMo-RL",
    keys=(
        same("distillation.num_prompts_per_step", key="data.train_batch_size"),
        same("distillation.num_generations_per_prompt", key=f"{ROLLOUT}.n"),
        same("distillation.max_num_steps", key="trainer.total_training_steps"),
        same("distillation.max_num_epochs", key="trainer.total_epochs"),
        same("distillation.val_period", key="trainer.test_freq"),
        same("distillation.val_at_start", key="trainer.val_before_train"),
        same("distillation.topk_logits_k", key=f"{TEACHER}.top_k"),
        same("distillation.seed", key="data.seed"),
        same("grpo.num_prompts_per_step", key="data.train_batch_size"),
        same("grpo.num_generations_per_prompt", key=f"{ROLLOUT}.n"),
        same("grpo.max_num_steps", key="trainer.total_training_steps"),
        other("grpo.*", advice="`gkd.use_rl_loss=true` adds GRPO; its keys are in the section `gkd`"),
        other(
            "loss_fn.kl_type",
            advice="`gkd.distill_loss_type=forward_kl`, `reverse_kl` or, for `mixed`, `kl_rkl`",
            values={
                "forward": "gkd.distill_loss_type=forward_kl",
                "reverse": "gkd.distill_loss_type=reverse_kl",
                "mixed": "gkd.distill_loss_type=kl_rkl",
            },
        ),
        other("loss_fn.mixed_kl_weight", advice="`gkd.rkl_ratio` = 1 - `mixed_kl_weight`"),
        other("loss_fn.zero_outside_topk", advice="`gkd.tail`"),
        same("loss_fn.ratio_clip_min", key="gkd.clip_ratio_low"),
        same("loss_fn.ratio_clip_max", key="gkd.clip_ratio_high"),
        same("policy.model_name", key=f"{MODEL}.path"),
        other("teacher.model_name", advice="`CKPT_PATH` of `teacher/start_server.sh`"),
        other("policy.max_total_sequence_length", advice="`data.max_prompt_length` and `data.max_response_length`"),
        other("policy.tokenizer.chat_template_kwargs*", advice="`data.apply_chat_template_kwargs`"),
        other("policy.train_global_batch_size", advice=BATCH),
        same("policy.train_micro_batch_size", key=f"{ACTOR}.micro_batch_size"),
        other("policy.precision", advice=DTYPE),
        same("policy.max_grad_norm", key=f"{OPTIM}.clip_grad"),
        same("policy.optimizer.kwargs.lr", key=f"{OPTIM}.lr"),
        same("policy.optimizer.kwargs.weight_decay", key=f"{OPTIM}.weight_decay"),
        same("policy.megatron_cfg.optimizer.lr", key=f"{OPTIM}.lr"),
        same("policy.megatron_cfg.optimizer.min_lr", key=f"{OPTIM}.min_lr"),
        *(
            same(f"policy.megatron_cfg.{name}", key=f"{MEGATRON}.{name}")
            for name in (
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "context_parallel_size",
                "expert_model_parallel_size",
                "expert_tensor_parallel_size",
                "sequence_parallel",
            )
        ),
        same("policy.router_replay.enabled", key=f"{ROLLOUT}.routing_replay"),
        same("policy.dynamic_batching.enabled", key=f"{ACTOR}.use_dynamic_bsz"),
        same("policy.dynamic_batching.train_mb_tokens", key=f"{ACTOR}.max_token_len"),
        other("policy.sequence_packing.*", advice=PACKED, fixed=ANY),
        same("policy.generation.temperature", key=f"{ROLLOUT}.temperature"),
        same("policy.generation.top_p", key=f"{ROLLOUT}.top_p"),
        same("policy.generation.max_new_tokens", key="data.max_response_length"),
        same("policy.generation.vllm_cfg.tensor_parallel_size", key=f"{ROLLOUT}.tensor_model_parallel_size"),
        same("policy.generation.vllm_cfg.gpu_memory_utilization", key=f"{ROLLOUT}.gpu_memory_utilization"),
        same("policy.generation.vllm_cfg.max_model_len", key=f"{ROLLOUT}.max_model_len"),
        same("policy.generation.vllm_cfg.enforce_eager", key=f"{ROLLOUT}.enforce_eager"),
        same("policy.generation.vllm_kwargs.async_scheduling", key=f"{ROLLOUT}.async_scheduling"),
        other(
            "policy.generation.colocated.enabled",
            advice="`actor_rollout_ref.hybrid_engine=true` with `trainer.scheduler=sync`",
            values={
                "true": "actor_rollout_ref.hybrid_engine=true trainer.scheduler=sync",
                "false": "actor_rollout_ref.hybrid_engine=false",
            },
        ),
        other(
            "policy.dtensor_cfg.*",
            advice=f"`{ACTOR}.strategy=fsdp` and the section `{FSDP}`",
        ),
        same("checkpointing.checkpoint_dir", key="trainer.default_local_dir"),
        same("checkpointing.save_period", key="trainer.save_freq"),
        other("checkpointing.checkpoint_must_save_by", advice="`trainer.save_before`"),
        other(
            "checkpointing.keep_top_k",
            "checkpointing.metric_name",
            advice="`trainer.max_actor_ckpt_to_keep` recent checkpoints, and the best by `trainer.best_metric`",
        ),
        other(
            "cluster.num_nodes",
            "cluster.gpus_per_node",
            advice="`trainer.nnodes` and `trainer.n_gpus_per_node` "
            "for the actor, `rollout.nnodes` and `rollout.n_gpus_per_node` for the rollout engines",
        ),
        other("logger.*", advice="`trainer.logger`, a list such as `[console,jsonl,wandb]`"),
        other(
            "distillation.*",
            "policy.*",
            "loss_fn.*",
            "checkpointing.*",
            "env.*",
            advice="docs/migration.md lists the keys that have a counterpart here",
        ),
    ),
)
