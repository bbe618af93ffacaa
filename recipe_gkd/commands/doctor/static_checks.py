"""Checks that start no process of a run, in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from recipe_gkd.commands.doctor.data_checks import data_findings, read_data_sets
from recipe_gkd.commands.doctor.environment_checks import environment_findings
from recipe_gkd.commands.doctor.findings import Finding, findings_of
from recipe_gkd.commands.doctor.machine_checks import (
    device_findings,
    device_of,
    folder_findings,
    logger_findings,
    memory_findings,
    name_lookup_findings,
    port_findings,
    shared_memory_findings,
    socket_findings,
    transport_findings,
)
from recipe_gkd.commands.doctor.reward_checks import reward_call_findings, reward_findings
from recipe_gkd.commands.doctor.student_checks import student_findings
from recipe_gkd.commands.doctor.teacher_checks import teacher_findings
from recipe_gkd.commands.doctor.versions import version_findings
from recipe_gkd.config import Config
from recipe_gkd.config.data_types import with_data_types
from recipe_gkd.preflight import with_model_path


def static_findings(config: Config) -> Iterator[Finding]:
    """Yield the findings of all checks. A check that needs the result of one that failed is skipped.

    Args:
        config: Valid configuration of the run.
    """
    device = device_of(config)
    config = with_data_types(config, device)
    yield from findings_of("versions", partial(version_findings, device))
    yield from findings_of("devices", partial(device_findings, config, device))
    if device == "cuda":
        yield from findings_of("weight transport", partial(transport_findings, config))
    yield from findings_of("shared memory", partial(shared_memory_findings, config, device))
    yield from findings_of("ports", partial(port_findings, config))
    yield from findings_of("name lookups", name_lookup_findings)
    yield from findings_of("sockets", partial(socket_findings, config))
    yield from findings_of("loggers", partial(logger_findings, config))
    student, found = student_findings(config)
    yield from found
    if student is not None:
        config = with_model_path(config, student.path)
        yield from findings_of("memory", partial(memory_findings, config, device))
    yield from findings_of("run folder", partial(folder_findings, config))
    data_sets, found = read_data_sets(config)
    yield from found
    if student is None:
        yield Finding("chat template", "skipped", "the student's tokenizer cannot be loaded")
        yield Finding("teacher", "skipped", "teachers are compared with the student, which cannot be loaded")
        return
    yield from environment_findings(config, data_sets, student.tokenizer)
    truth_use, found = reward_findings(config)
    yield from found
    if [finding.severity for finding in found] == ["ok"]:
        yield from reward_call_findings(config, data_sets, student.tokenizer, truth_use)
    for key, data_set in data_sets.items():
        check = partial(data_findings, config, key, data_set, student.tokenizer, truth_use=truth_use)
        yield from findings_of(key, check)
    yield from teacher_findings(config, data_sets.get("data.train_files"), student)
