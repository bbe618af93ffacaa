"""Keys of TRL's ``GKDTrainer`` and ``DistillationTrainer``."""

from __future__ import annotations

from recipe_gkd.config.foreign_keys.common_names import DECAY, NO_LIMIT
from recipe_gkd.config.foreign_keys.entries import ANY, BATCH, DTYPE, PACKED, RECOMPUTE, Project, other, same
from recipe_gkd.config.keys import LORA, MEGATRON, MODEL, OPTIM, ROLLOUT, TEACHER

TRL = Project(
    name="TRL",
    keys=(
        same("model_name_or_path", key=f"{MODEL}.path"),
        other(
            "teacher_model_name_or_path",
            advice="`CKPT_PATH` of `teacher/start_server.sh`, or with "
            f"`{TEACHER}.backend=hf` the key `{TEACHER}.model_path`",
        ),
        other(
            "teacher_model_server_url",
            "use_teacher_server",
            advice=f"`{TEACHER}.backend=http` with `{TEACHER}.url`, or our own service: `{TEACHER}.server_ip` and "
            f"`{TEACHER}.server_port`",
        ),
        other(
            "teacher_model_init_kwargs",
            "teacher_model_revision",
            advice="options of the teacher's service or server",
        ),
        other("lmbda", advice="`gkd.sft_share` = 1 - `lmbda`, with `gkd.sft_target=teacher`", fixed=("1", "1.0")),
        other(
            "beta",
            advice="`gkd.distill_loss_type=jsd` with `gkd.beta`, the same formula; for 0 and 1 write "
            "`gkd.distill_loss_type=forward_kl` and `reverse_kl`",
            values={
                "0": "gkd.distill_loss_type=forward_kl",
                "0.0": "gkd.distill_loss_type=forward_kl",
                "1": "gkd.distill_loss_type=reverse_kl",
                "1.0": "gkd.distill_loss_type=reverse_kl",
            },
        ),
        other(
            "temperature",
            advice=f"two keys: `gkd.distill_temperature` for the loss, `{ROLLOUT}.temperature` for sampling",
        ),
        other("seq_kd", advice="`gkd.sft_share=1`, with the teacher's responses in the column `data.response_key`"),
        other("loss_top_k", advice=f"`{TEACHER}.top_k`, at most the service's `N_LOGPROBS`; null: all of them"),
        other(
            "loss_add_tail",
            advice="`gkd.tail=bucket` (default) for true, `renormalize` for false",
            values={"true": "gkd.tail=bucket", "false": "gkd.tail=renormalize"},
        ),
        other(
            "reward_funcs",
            "reward_weights",
            advice="`custom_reward_function.path`, or several weighted ones in `custom_reward_function.functions`",
        ),
        same("max_new_tokens", key="data.max_response_length"),
        same("max_completion_length", key="data.max_response_length"),
        same("max_prompt_length", key="data.max_prompt_length"),
        other("max_length", advice="`data.max_prompt_length` and `data.max_response_length`"),
        same("num_generations", key=f"{ROLLOUT}.n"),
        same("top_p", key=f"{ROLLOUT}.top_p"),
        same("top_k", key=f"{ROLLOUT}.top_k"),
        other("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", advice=BATCH),
        same("learning_rate", key=f"{OPTIM}.lr"),
        same("weight_decay", key=f"{OPTIM}.weight_decay"),
        same("max_grad_norm", key=f"{OPTIM}.clip_grad"),
        same("warmup_steps", key=f"{OPTIM}.lr_warmup_steps"),
        same("warmup_ratio", key=f"{OPTIM}.lr_warmup_steps_ratio"),
        other("lr_scheduler_type", advice=f"`{OPTIM}.lr_decay_style`: `constant`, `linear` or `cosine`", values=DECAY),
        other("adam_beta1", "adam_beta2", advice=f"`{OPTIM}.betas`"),
        same("num_train_epochs", key="trainer.total_epochs"),
        same("max_steps", key="trainer.total_training_steps", values=NO_LIMIT),
        same("save_steps", key="trainer.save_freq"),
        same("save_total_limit", key="trainer.max_actor_ckpt_to_keep"),
        same("eval_steps", key="trainer.test_freq"),
        same("output_dir", key="trainer.default_local_dir"),
        same("run_name", key="trainer.experiment_name"),
        other("resume_from_checkpoint", advice="`trainer.resume_mode` and `trainer.resume_from_path`"),
        other("report_to", advice="`trainer.logger`, a list"),
        same("seed", key="data.seed"),
        other("bf16", "fp16", advice=DTYPE),
        other("gradient_checkpointing", advice=RECOMPUTE),
        other("dataset_name", advice="`data.train_files`: parquet files on disk"),
        other(
            "use_vllm",
            "vllm_mode",
            advice="remove it: vLLM always generates; `actor_rollout_ref.hybrid_engine=true` "
            "shares its devices with the actor",
        ),
        same("vllm_gpu_memory_utilization", key=f"{ROLLOUT}.gpu_memory_utilization"),
        same("vllm_tensor_parallel_size", key=f"{ROLLOUT}.tensor_model_parallel_size"),
        same("vllm_max_model_length", key=f"{ROLLOUT}.max_model_len"),
        other("max_staleness", advice="`trainer.scheduler=n_step_off` with `trainer.max_staleness`"),
        same("use_fused_linear_loss", key="gkd.fuse_lm_head"),
        same("lora_r", key=f"{LORA}.rank"),
        same("lora_alpha", key=f"{LORA}.alpha"),
        same("lora_dropout", key=f"{LORA}.dropout"),
        same("lora_target_modules", key=f"{LORA}.target_modules"),
        other("disable_dropout", advice="remove it: the student is trained without dropout", fixed=("true",)),
        other("logging_steps", "logging_strategy", advice="remove it: each step is logged", fixed=ANY),
        other("use_peft", advice=f"`{LORA}.rank` trains LoRA", fixed=("false",)),
        other("optim", advice="remove it: the optimizer is AdamW", fixed=("adamw_torch", "adamw_torch_fused", "adamw")),
        other("packing", advice=PACKED, fixed=ANY),
        other(
            "attn_implementation",
            advice=f"remove it: the engines choose their attention; `{MEGATRON}.transformer_impl` selects the layers",
            fixed=ANY,
        ),
        other(
            "save_strategy",
            advice="`trainer.save_freq`, the number of steps between checkpoints",
            values={"no": "trainer.save_freq=-1"},
            fixed=("steps",),
        ),
        other(
            "eval_strategy",
            "evaluation_strategy",
            advice="`trainer.test_freq`, the number of steps between validations",
            values={"no": "trainer.test_freq=-1"},
            fixed=("steps",),
        ),
        same("trust_remote_code", key=f"{MODEL}.trust_remote_code"),
        same("shuffle_dataset", key="data.shuffle"),
        other("chat_template_kwargs", advice="`data.apply_chat_template_kwargs`, the same mapping"),
        other(
            "min_p",
            "repetition_penalty",
            "generation_kwargs",
            advice=f"remove it: sampling has `temperature`, `top_p` and `top_k` of `{ROLLOUT}`",
        ),
    ),
)
