"""Names that several projects use for a key, written in the sections of this project."""

from __future__ import annotations

from recipe_gkd.config.foreign_keys.entries import Project, other, same
from recipe_gkd.config.keys import OPTIM

DECAY = {style: f"{OPTIM}.lr_decay_style={style}" for style in ("constant", "linear", "cosine")}
NO_LIMIT = {"-1": "trainer.total_training_steps=null"}
"""Number of steps with which the number of epochs decides, as in transformers' ``TrainingArguments``."""

COMMON_NAMES = Project(
    name="other projects",
    keys=(
        same("gkd.temperature", "gkd.kd_temperature", key="gkd.distill_temperature"),
        same("gkd.loss", "gkd.loss_type", "gkd.distill_loss", key="gkd.distill_loss_type"),
        same("trainer.total_steps", "trainer.max_steps", key="trainer.total_training_steps", values=NO_LIMIT),
        same("trainer.epochs", "trainer.num_epochs", "trainer.max_epochs", key="trainer.total_epochs"),
        same("data.batch_size", key="data.train_batch_size"),
        same(f"{OPTIM}.learning_rate", "optim.learning_rate", key=f"{OPTIM}.lr"),
        other(
            f"{OPTIM}.lr_scheduler_type",
            f"{OPTIM}.warmup_style",
            "optim.lr_scheduler_type",
            "optim.warmup_style",
            advice=f"`{OPTIM}.lr_decay_style`: `constant`, `linear` or `cosine`",
            values=DECAY,
        ),
    ),
)
