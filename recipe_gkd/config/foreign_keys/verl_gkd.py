"""Keys of verl's recipe ``gkd``."""

from __future__ import annotations

from recipe_gkd.config.foreign_keys.entries import ANY, SERVICE, Project, other, same
from recipe_gkd.config.keys import ACTOR, MEGATRON, MODEL, OPTIM, ROLLOUT, TEACHER

VERL_GKD = Project(
    name="verl gkd",
    keys=(
        same("gkd.teacher_ip", key=f"{TEACHER}.server_ip"),
        same("gkd.teacher_port", key=f"{TEACHER}.server_port"),
        same("gkd.teacher_topk", key=f"{TEACHER}.top_k"),
        same("gkd.teacher_n_server_workers", key=f"{TEACHER}.n_server_workers"),
        same("gkd.teacher_num_microbatches", key=f"{TEACHER}.num_microbatches"),
        other(
            f"{TEACHER}.overlap_rollout", advice="remove it: the teacher always scores while others generate", fixed=ANY
        ),
        other(f"{TEACHER}.n_gpus_per_node", advice=SERVICE),
        other(
            f"{ACTOR}.distill_loss.name",
            advice="`gkd.distill_loss_type=forward_kl` for `kl`, `reverse_kl` for `rkl`, `kl_rkl` and `jsd`",
            values={
                name: f"gkd.distill_loss_type={ours}"
                for name, ours in (("kl", "forward_kl"), ("rkl", "reverse_kl"), ("kl_rkl", "kl_rkl"), ("jsd", "jsd"))
            },
        ),
        same(f"{ACTOR}.distill_loss.rkl_ratio", key="gkd.rkl_ratio"),
        same(f"{ACTOR}.distill_loss.beta", key="gkd.beta"),
        other(
            f"{MEGATRON}.dist_checkpointing_path",
            f"{MEGATRON}.use_dist_checkpointing",
            f"{MEGATRON}.use_mbridge",
            advice=f"remove it: the student is read from `{MODEL}.path`, a Hugging Face folder",
            fixed=("false",),
        ),
        other(f"{ROLLOUT}.mode", advice="remove it: the engine is vLLM, and responses arrive one by one", fixed=ANY),
        other(
            f"{ROLLOUT}.free_cache_engine",
            advice=f"`{ROLLOUT}.sleep_level`, which is used with `actor_rollout_ref.hybrid_engine=true`",
            fixed=("true",),
        ),
        same("teacher.server_ip", key=f"{TEACHER}.server_ip"),
        same("teacher.server_port", key=f"{TEACHER}.server_port"),
        other(
            "kd_loss_type",
            f"{ACTOR}.kd_loss_type",
            "gkd.kd_loss_type",
            advice="`gkd.distill_loss_type`: `forward_kl`, `reverse_kl`, `kl_rkl` or `jsd`",
        ),
        other(
            "jsd_alpha",
            f"{ACTOR}.jsd_alpha",
            "gkd.jsd_alpha",
            advice="`gkd.distill_loss_type=jsd` with `gkd.beta`, the weight of the teacher in the mixture",
        ),
        other(
            "vllm_load_weights_size",
            "*.vllm_load_weights_size",
            advice=f"`{ROLLOUT}.update_weights_bucket_megabytes`: weights are sent and loaded in these buckets",
        ),
        other(
            f"{ACTOR}.profiler.enable",
            f"{ACTOR}.profiler.all_ranks",
            advice="`trainer.profile.steps` and `trainer.profile.ranks`, two lists, start torch's profiler",
            fixed=("false",),
        ),
        same(f"{ACTOR}.profiler.ranks", key="trainer.profile.ranks"),
        other(
            f"{ACTOR}.profiler.*",
            "global_profiler.*",
            advice="remove it: torch's profiler records the steps `trainer.profile.steps` on `trainer.profile.ranks`",
            fixed=ANY,
        ),
        other(
            f"{ROLLOUT}.data_parallel_size",
            f"{ROLLOUT}.expert_parallel_size",
            f"{ROLLOUT}.pipeline_model_parallel_size",
            advice=f"remove it: the rollout pool has as many engines as `{ROLLOUT}.tensor_model_parallel_size` allows",
            fixed=("1",),
        ),
        other(
            f"{OPTIM}.total_training_steps",
            f"{OPTIM}.lr_decay_steps",
            advice="remove it: the schedule ends with the last step, `trainer.total_training_steps` or `total_epochs`",
            fixed=("-1",),
        ),
        other(
            f"{OPTIM}.lr_wsd_decay_style",
            f"{OPTIM}.lr_wsd_decay_steps",
            advice=f"remove it: `{OPTIM}.lr_decay_style` has no WSD schedule",
            fixed=ANY,
        ),
        other(f"{OPTIM}.optimizer", advice="remove it: the optimizer is AdamW", fixed=("adam", "adamw")),
        other(f"{OPTIM}.lr_warmup_init", advice="remove it: the warm-up starts at 0", fixed=("0", "0.0")),
        other(
            f"{OPTIM}.weight_decay_incr_style", advice="remove it: the weight decay is constant", fixed=("constant",)
        ),
        other(
            f"{OPTIM}.use_checkpoint_opt_param_scheduler",
            advice="remove it: a resumed run follows the schedule of its configuration from the step of its checkpoint",
            fixed=("false",),
        ),
        other(f"{MEGATRON}.seed", f"{ACTOR}.data_loader_seed", advice="`data.seed`: the only seed", fixed=("42",)),
        other(f"{ACTOR}.load_weight", advice=f"remove it: the weights are read from `{MODEL}.path`", fixed=("true",)),
        other(
            f"{MODEL}.custom_chat_template",
            advice="the chat template in the tokenizer's files of the model folder; "
            "its arguments are `data.apply_chat_template_kwargs`",
        ),
        other(f"{MODEL}.external_lib", advice=f"`{MODEL}.trust_remote_code` runs the code of the model folder"),
        other(
            f"{MODEL}.override_config.model_config.num_nextn_predict_layers",
            f"{MODEL}.override_config.moe_config.freeze_moe_router",
            advice="remove it: there is no multi-token prediction, and routers are trained",
            fixed=("0", "false"),
        ),
        other(
            f"{MODEL}.override_config",
            f"{MODEL}.override_config.*",
            advice="a copy of the model folder with another `config.json`",
        ),
        same("data.trust_remote_code", key=f"{MODEL}.trust_remote_code"),
        other(
            "data.custom_cls.*",
            "data.sampler.*",
            advice="remove it: rows are read from `data.train_files` in the order of `data.shuffle` and `data.seed`",
        ),
        other("data.return_multi_modal_inputs", advice="remove it: prompts are text", fixed=ANY),
        other(f"{ROLLOUT}.ignore_eos", advice="remove it: responses end at an end token", fixed=("false",)),
        other(
            f"{ROLLOUT}.prompt_length",
            advice="`data.max_prompt_length`",
            fixed=("${data.max_prompt_length}",),
        ),
        other(
            f"{ROLLOUT}.response_length",
            advice="`data.max_response_length`",
            fixed=("${data.max_response_length}",),
        ),
        other(
            f"{ROLLOUT}.disable_log_stats",
            f"{ROLLOUT}.enable_chunked_prefill",
            f"{ROLLOUT}.layer_name_map.*",
            f"{ROLLOUT}.calculate_log_probs",
            advice="remove it: nothing here needs it",
            fixed=ANY,
        ),
        other(
            "trainer.ray_wait_register_center_timeout",
            advice="remove it: `trainer.startup_timeout_s` limits the start of the workers",
            fixed=ANY,
        ),
        other(
            "trainer.esi_redundant_time",
            advice="`trainer.save_before`: the run saves and ends after this time",
            fixed=("0",),
        ),
        other("*._target_", advice="remove it: the sections have no class of verl", fixed=ANY),
    ),
)
