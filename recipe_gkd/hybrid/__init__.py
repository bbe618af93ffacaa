"""Stages that take turns on the same devices: actor, rollout engines and teacher."""

from recipe_gkd.hybrid.devices import Devices, open_devices
from recipe_gkd.hybrid.teacher import teacher_asleep

__all__ = ["Devices", "open_devices", "teacher_asleep"]
