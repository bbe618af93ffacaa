"""Section ``gkd``, the training objective."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator
from pydantic.dataclasses import dataclass

from recipe_gkd.config.choices import (
    OneOf,
    absolute_path,
    absolute_source,
    importance_modes,
    kernel_backends,
    loss_names,
    tail_modes,
)
from recipe_gkd.config.limits import MAX_COEFFICIENT, MAX_INT32, MAX_STEPS
from recipe_gkd.config.schema.fields import STRICT, SourcePath, UserPath, key
from recipe_gkd.config.schema.unused import (
    ALL_REFERENCES,
    CUSTOM_LOSS,
    NO_POLICY_LOSS,
    NO_REFERENCE_RESPONSES,
    NO_TEACHER,
    SAMPLED_TOKEN_LOSS,
    TOP_K_LOSS,
    needs,
    needs_parameter,
)

AdvantageBaseline = Literal["none", "expected", "group"]
AggregationMode = Literal["token-mean", "seq-mean-token-mean"]
SftTarget = Literal["data", "teacher"]


def _current_tail_mode(value: Any) -> Any:
    return "renormalize" if value == "renormalise" else value  # former spelling


LossType = Annotated[str, AfterValidator(OneOf(loss_names))]
TailMode = Annotated[str, BeforeValidator(_current_tail_mode), AfterValidator(OneOf(tail_modes))]
ImportanceMode = Annotated[str, AfterValidator(OneOf(importance_modes))]
KernelBackend = Annotated[str, AfterValidator(OneOf(kernel_backends))]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CustomLossConfig:
    """Distillation loss from a user's file."""

    path: Annotated[UserPath | None, AfterValidator(absolute_path)] = key(
        "Python file of a loss function that replaces `gkd.distill_loss_type`. null: no custom loss."
    )
    name: str | None = key("Name of the function in that file: `LossInputs` -> `LossOutputs` of `recipe_gkd.losses`.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GkdConfig:
    """Objective, section ``gkd``: distillation, policy loss and cross-entropy, each with a coefficient."""

    enable_teacher: bool | None = key(
        "Score responses with the teacher. false: no teacher is needed, for a policy loss or reference responses "
        "alone. null: true if the distillation loss is trained on, with `distill_loss_coef` above 0 and responses "
        "other than reference responses with `sft_target=data`."
    )
    distill_loss_type: LossType = key(
        "Distillation loss at each position: a divergence between teacher P and student Q on the ids of "
        "`teacher.support`, or an estimate of reverse KL from the sampled token alone (`k1`: policy gradient, `k2`, "
        "`k3`).",
        unused=[NO_TEACHER, CUSTOM_LOSS],
    )
    distill_loss_coef: float = key(
        "Coefficient of the distillation loss. 0: it is not trained on, and with `enable_teacher=true` it is measured.",
        ge=0,
        le=MAX_COEFFICIENT,
    )
    max_loss_position: int | None = key(
        "Number of response tokens, from the first one, that the teacher scores and the distillation loss covers. The "
        "other terms cover whole responses. null: all tokens.",
        unused=[NO_TEACHER],
        ge=1,
        le=MAX_INT32,
    )
    distill_temperature: float = key(
        "Temperature of both distributions: logits are divided by it before the softmax.",
        unused=[NO_TEACHER],
        ge=1e-3,
        le=1e3,
    )
    tail: TailMode = key(
        "Ids outside the support. `bucket` merges them into one outcome; `renormalize` omits them and divides "
        "both distributions by their remaining mass (biased); `none` omits them from the sum (biased); `generalized` "
        "does too, with the generalized KL divergence, which is minimal where student and teacher are equal.",
        unused=[NO_TEACHER, CUSTOM_LOSS, SAMPLED_TOKEN_LOSS],
    )
    token_clip: float | None = key(
        "Upper bound of the divergence of a token, in nats. A token above it has this loss and no gradient, so that "
        "single tokens do not dominate an update. null: no bound.",
        unused=[NO_TEACHER, CUSTOM_LOSS, SAMPLED_TOKEN_LOSS],
        gt=0,
        le=MAX_COEFFICIENT,
    )
    position_weights: Annotated[SourcePath | None, AfterValidator(absolute_source)] = key(
        "Weight of each response token in the distillation loss, from a function of your own, `FILE.py:function`: "
        "`LossInputs` of `recipe_gkd.losses` -> weights [T] of at least 0, without gradient. null: 1.",
        unused=[NO_TEACHER, CUSTOM_LOSS],
    )
    position_weights_key: str | None = key(
        "Column with the weights of response tokens in the distillation loss: a number for all tokens of the row's "
        "responses, or a list, whose value t is for token t and whose last value is for all later ones. A row without "
        "a value has weight 1. They are multiplied by those of `position_weights`. null: 1.",
        unused=[NO_TEACHER, CUSTOM_LOSS],
    )
    beta: float = key(
        "Weight of the teacher in the mixture of `jsd`. Near 0 the loss is about `beta` times forward KL, near 1 about "
        "`1 - beta` times reverse KL, so it vanishes at both ends: use `forward_kl` or `reverse_kl` there.",
        unused=[CUSTOM_LOSS, needs_parameter("beta", "jsd")],
        ge=1e-6,
        le=1 - 1e-6,
    )
    rkl_ratio: float = key(
        "Weight of reverse KL in `kl_rkl`. Forward KL has the remaining weight.",
        unused=[CUSTOM_LOSS, needs_parameter("rkl_ratio", "kl_rkl")],
        ge=0,
        le=1,
    )
    skew_alpha: float = key(
        "Weight of the first distribution in the mixture of `skewed_forward_kl` and `skewed_reverse_kl`.",
        unused=[CUSTOM_LOSS, needs_parameter("skew_alpha", "skewed_forward_kl")],
        ge=1e-6,
        le=1 - 1e-6,
    )
    use_rl_loss: bool = key("Add a GRPO policy loss on the rewards of `custom_reward_function`.")
    rl_loss_coef: float = key("Coefficient of the policy loss.", unused=[NO_POLICY_LOSS], ge=0, le=MAX_COEFFICIENT)
    clip_ratio_low: float = key(
        "Lower clip range of the policy loss: the probability ratio is clipped at 1 - this value.",
        unused=[NO_POLICY_LOSS],
        gt=0,
        le=1,
    )
    clip_ratio_high: float = key(
        "Upper clip range of the policy loss: the probability ratio is clipped at 1 + this value.",
        unused=[NO_POLICY_LOSS],
        gt=0,
        le=MAX_COEFFICIENT,
    )
    clip_ratio_c: float = key(
        "Dual-clip bound of the policy loss: maximum probability ratio for negative advantages.",
        unused=[NO_POLICY_LOSS],
        gt=1,
        le=MAX_COEFFICIENT,
    )
    norm_adv_by_std: bool = key(
        "Divide advantages by the standard deviation of the rewards of the same prompt, plus 1e-6.",
        unused=[NO_POLICY_LOSS],
    )
    importance: ImportanceMode = key(
        "Importance sampling correction of `k1`, `k2` and `k3` for tokens that older weights sampled. `truncate`: the "
        "probability ratio is limited to `importance_cap`; `mask`: tokens with a higher ratio are excluded; `none`: no "
        "correction.",
        unused=[CUSTOM_LOSS, TOP_K_LOSS],
    )
    importance_cap: float = key(
        "Maximum probability ratio of the importance sampling correction.", ge=1, le=MAX_COEFFICIENT
    )
    baseline: AdvantageBaseline = key(
        "Baseline of `k1`, subtracted from log p - log q of the sampled token to reduce variance. `expected`: the "
        "expectation at this position, from the ids of the support; `group`: the mean over the tokens of the other "
        "responses to the same prompt, after which the result is divided by their standard deviation (at least 0.1 "
        "nats); `none`: no baseline.",
        unused=[CUSTOM_LOSS, needs(lambda config: config.gkd.distill_loss_type, "k1")],
    )
    sft_share: float = key(
        "Fraction of the prompts that are trained on the reference response instead of a sampled one.", ge=0, le=1
    )
    warmup_steps: int = key(
        "Number of steps at the start that train on the reference responses of all their prompts, with `sft_target`. "
        "The later steps follow `sft_share`.",
        unused=[ALL_REFERENCES],
        ge=0,
        le=MAX_STEPS,
    )
    sft_target: SftTarget = key(
        "Target of reference responses. `data`: cross-entropy with their tokens; `teacher`: distillation from the "
        "teacher's distributions along them.",
        unused=[NO_REFERENCE_RESPONSES],
    )
    sft_loss_coef: float = key(
        "Coefficient of the cross-entropy with reference responses.",
        unused=[NO_REFERENCE_RESPONSES, needs(lambda config: config.gkd.sft_target, "data")],
        ge=0,
        le=MAX_COEFFICIENT,
    )
    loss_agg_mode: AggregationMode = key(
        "Normalization of the loss over the global batch. `token-mean`: every token has the same weight; "
        "`seq-mean-token-mean`: every non-empty response has the same weight."
    )
    chunk_tokens: int | None = key(
        "Number of positions per chunk of the loss. Lower values use less memory. null: chosen for the device.",
        ge=1,
        le=MAX_INT32,
    )
    fuse_lm_head: bool = key(
        "Compute the output layer inside the loss, chunk by chunk. The full logits are never stored; they are computed "
        "twice. Set it to true if the logits do not fit into memory."
    )
    kernel_backend: KernelBackend = key(
        "Kernels of the loss, and of the Megatron layers of this project: `torch`; `triton`, on a GPU; "
        "`auto`: Triton on a GPU where it is installed and compiles."
    )
    custom_loss: CustomLossConfig
