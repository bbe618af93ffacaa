"""Arguments and output of the command."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict

from recipe_gkd.commands.arguments import command_parser
from recipe_gkd.commands.doctor.findings import Finding, line_of, summary_of
from recipe_gkd.commands.doctor.static_checks import static_findings
from recipe_gkd.config.load import LoadedConfig, read_config
from recipe_gkd.errors import ConfigError
from teacher.errors import TeacherError

CONFIGURATION = "configuration"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 without a problem, 1 with one, 130 after Ctrl-C.
    """
    arguments = _parse(argv)
    logging.getLogger("recipe_gkd").addHandler(logging.NullHandler())  # findings have the texts of the warnings
    found: list[Finding] = []
    # Ray prints the workers' output to stdout, which must contain nothing but JSON.
    others = redirect_stdout(sys.stderr) if arguments.json else nullcontext()
    try:
        with others:
            for finding in _findings(arguments):
                found.append(finding)
                if not arguments.json:
                    print(line_of(finding), flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    has_problem = any(finding.severity == "problem" for finding in found)
    if arguments.json:
        print(json.dumps({"passed": not has_problem, "findings": [asdict(finding) for finding in found]}, indent=1))
    else:
        print(f"\n{summary_of(found)}")
    return int(has_problem)


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    try:
        loaded = read_config(arguments.config_name, arguments.overrides, arguments.config_dir)
    except (ConfigError, TeacherError) as error:
        yield Finding(CONFIGURATION, "problem", str(error))
        return
    yield from _configuration_findings(arguments, loaded)
    has_problem = False
    for finding in static_findings(loaded.config):
        has_problem |= finding.severity == "problem"
        yield finding
    if arguments.quick:
        return
    if has_problem:
        yield Finding("workers", "skipped", "nothing was started, because a check before found a problem")
        return
    from recipe_gkd.commands.doctor.live_checks import live_findings  # imports Ray

    yield from live_findings(loaded.config)


def _configuration_findings(arguments: argparse.Namespace, loaded: LoadedConfig) -> Iterator[Finding]:
    yield Finding(CONFIGURATION, "ok", f"{arguments.config_name} with {len(arguments.overrides)} overrides is valid")
    for text in loaded.warnings:
        yield Finding(CONFIGURATION, "warning", text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from recipe_gkd.commands import doctor

    parser = command_parser("doctor", doctor.__doc__)
    parser.add_argument("--quick", action="store_true", help="start nothing: neither Ray nor workers")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser.parse_intermixed_args(argv)
