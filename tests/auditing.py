"""`make audit`: pip-audit over constraints.txt, with an exit code of its own for "not checked".

pip-audit prints "No known vulnerabilities found" and exits with 0 also when it learned nothing
about any package, for example from a mirror without PyPI's advisories. Here 0 means that every
package was looked up, 1 that a package is vulnerable, 2 that some package could not be checked.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

CLEAN: Final = 0
VULNERABLE: Final = 1
NOT_TOLD: Final = 2
SERVICES: Final = ("pypi", "osv")  # the second is asked where the first has no data
_AUDIT_S: Final = 300


class Vulnerability(msgspec.Struct):
    id: str
    fix_versions: list[str] = []


class Package(msgspec.Struct):
    """A service's findings about a package; `skip_reason` where it has no data."""

    name: str
    version: str = ""
    vulns: list[Vulnerability] = []
    skip_reason: str = ""


class Report(msgspec.Struct):
    dependencies: list[Package]


class Answer(msgspec.Struct):
    """A service's report on a file; `report` is None where the service could not be reached."""

    service: str
    report: Report | None
    trouble: str = ""


def ask(service: str, constraints: str) -> Answer:
    """Ask a service about the packages of a file."""
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service]
    command += ["--requirement", constraints, "--no-deps", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", "15"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_AUDIT_S
        )
    except subprocess.TimeoutExpired:
        return Answer(service, None, f"no answer in {_AUDIT_S} s")
    try:
        return Answer(service, msgspec.json.decode(done.stdout, type=Report))
    except msgspec.DecodeError:
        last = done.stderr.strip().rpartition("\n")[2]
        return Answer(service, None, last or f"exit code {done.returncode}")


def judge(answer: Answer) -> tuple[int, list[str]]:
    """The exit code for an answer, and the lines to print."""
    if answer.report is None:
        return NOT_TOLD, [f"{answer.service}: not reached: {answer.trouble}"]
    packages = answer.report.dependencies
    found = [
        f"{each.name} {each.version}: {flaw.id}, mended in {', '.join(flaw.fix_versions) or 'none'}"
        for each in packages
        for flaw in each.vulns
    ]
    unknown = [each for each in packages if each.skip_reason]
    if found:
        return VULNERABLE, found
    if unknown or not packages:
        said = f"{answer.service}: knows nothing of {len(unknown)} of {len(packages)} packages"
        return NOT_TOLD, [said, *(each.skip_reason for each in unknown[:1])]
    return CLEAN, [f"{answer.service}: {len(packages)} packages, no known vulnerability"]


def audit(constraints: str, asking: Callable[[str, str], Answer] = ask) -> tuple[int, list[str]]:
    """The first service that knows all packages decides; a vulnerability found by either one
    decides at once.
    """
    said: list[str] = []
    for service in SERVICES:
        code, lines = judge(asking(service, constraints))
        said += lines
        if code != NOT_TOLD:
            return code, said
    return NOT_TOLD, [*said, "NOT AUDITED: no advisory service could be asked about all of this."]


def main(arguments: Sequence[str]) -> int:
    code, lines = audit(*arguments)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
