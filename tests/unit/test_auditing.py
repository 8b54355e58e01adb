"""An audit that learned nothing counts as failed."""

from typing import Any

import msgspec
import pytest

from tests.auditing import CLEAN, NOT_TOLD, VULNERABLE, Answer, Report, audit, judge

KNOWN = {"name": "a", "version": "1", "vulns": []}
UNKNOWN = {"name": "b", "skip_reason": "Dependency not found on PyPI and could not be audited: b"}
FLAWED = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}


def answer(*packages: Any, service: str = "pypi") -> Answer:
    return Answer(service, msgspec.convert({"dependencies": packages}, Report))


@pytest.mark.parametrize(
    ("packages", "code"),
    [
        ([KNOWN], CLEAN),
        ([KNOWN, FLAWED], VULNERABLE),
        ([UNKNOWN, FLAWED], VULNERABLE),
        ([KNOWN, UNKNOWN], NOT_TOLD),
        ([], NOT_TOLD),
    ],
)
def test_only_packages_that_were_all_looked_up_are_clean(packages: list[Any], code: int) -> None:
    assert judge(answer(*packages))[0] == code


def test_a_vulnerability_is_named_with_the_version_that_mends_it() -> None:
    assert judge(answer(FLAWED))[1] == ["c 2: CVE-1, mended in 2.1"]


def test_the_other_service_is_asked_where_the_first_knows_nothing() -> None:
    answers = {"pypi": answer(UNKNOWN), "osv": answer(KNOWN, service="osv")}
    code, said = audit("constraints.txt", lambda service, _: answers[service])
    assert code == CLEAN
    assert said[-1] == "osv: 1 packages, no known vulnerability"


def test_where_nobody_could_be_asked_that_is_said_and_is_no_success() -> None:
    code, said = audit("constraints.txt", lambda service, _: Answer(service, None, "no network"))
    assert code == NOT_TOLD
    assert said[0] == "pypi: not reached: no network"
    assert said[-1].startswith("NOT AUDITED")
