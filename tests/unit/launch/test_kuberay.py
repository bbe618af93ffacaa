"""launch/kuberay.yaml: structure of a RayJob, and agreement of its numbers with the training's keys."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import jsonschema
import yaml

from recipe_gkd.config import load_config
from recipe_gkd.config.durations import duration_s
from tests._support.repository import REPO

QUANTITY = {"type": "string", "pattern": r"^[0-9]+(Gi|Mi)?$"}


def mapping(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of a mapping. Other keys are refused, as Kubernetes prunes unknown fields silently."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": schema}


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
RESOURCES = mapping({"cpu": QUANTITY, "memory": QUANTITY}, {"nvidia.com/gpu": QUANTITY})
CONTAINER = mapping(
    {"name": TEXT, "image": TEXT, "resources": mapping({"requests": RESOURCES, "limits": RESOURCES})},
    {
        "ports": items(mapping({"containerPort": COUNT}, {"name": {"type": "string", "maxLength": 15}})),
        "env": items(mapping({"name": TEXT}, {"value": TEXT, "valueFrom": {"type": "object"}})),
        "volumeMounts": items(mapping({"name": TEXT, "mountPath": {"type": "string", "pattern": "^/"}})),
    },
)
VOLUME = mapping(
    {"name": TEXT},
    {
        "persistentVolumeClaim": mapping({"claimName": TEXT}),
        "emptyDir": mapping({}, {"medium": {"const": "Memory"}, "sizeLimit": QUANTITY}),
    },
)
POD = mapping(
    {"spec": mapping(
        {"containers": items(CONTAINER)},
        {"volumes": items(VOLUME), "terminationGracePeriodSeconds": COUNT, "restartPolicy": {"const": "Never"}},
    )}
)  # fmt: skip
START_PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}  # KubeRay accepts strings only
WORKERS = mapping(
    {"groupName": TEXT, "template": POD, "rayStartParams": START_PARAMS}
    | dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), COUNT)
)
RAY_JOB = mapping(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": mapping({"name": {"type": "string", "pattern": "^[a-z0-9-]{1,47}$"}}),
        "spec": mapping(
            {
                "entrypoint": TEXT,
                "rayClusterSpec": mapping(
                    {
                        "rayVersion": TEXT,
                        "headGroupSpec": mapping({"template": POD, "rayStartParams": START_PARAMS}),
                        "workerGroupSpecs": items(WORKERS),
                    }
                ),
            },
            {
                **dict.fromkeys(("backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"), COUNT),
                "shutdownAfterJobFinishes": {"const": True},
                "submitterPodTemplate": POD,
            },
        ),
    }
)
"""Fields of KubeRay 1.3 that the file uses, with those that its resource definition and the operator require."""


def read_job() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((REPO / "launch/kuberay.yaml").read_text())
    return job


def test_ray_job_has_the_structure_of_its_resource() -> None:
    jsonschema.Draft7Validator(RAY_JOB).validate(read_job())


def test_every_volume_mount_has_a_volume() -> None:
    cluster = read_job()["spec"]["rayClusterSpec"]
    for pod in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = pod["template"]["spec"]
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_pools_of_the_training_fill_the_cluster() -> None:
    spec = read_job()["spec"]
    program, module, option, name, *overrides = spec["entrypoint"].split()[1:]
    assert (program, module, option) == ("-m", "recipe_gkd.main_gkd", "--config-name")
    config = load_config(name, overrides)
    [workers] = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == config.trainer.nnodes + config.rollout.nnodes
    [container] = workers["template"]["spec"]["containers"]
    n_gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert n_gpus == config.trainer.n_gpus_per_node == config.rollout.n_gpus_per_node
    assert duration_s(str(config.trainer.save_before)) <= spec["activeDeadlineSeconds"] - 600


def test_ray_version_is_the_installed_one() -> None:
    version = read_job()["spec"]["rayClusterSpec"]["rayVersion"]
    assert version == importlib.metadata.version("ray")
    assert re.search(r"^    ray\[default\]==2\.60\.\*$", (REPO / "setup.cfg").read_text(), flags=re.MULTILINE)
