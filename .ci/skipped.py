"""Fail where tests were skipped that should have run: ``python .ci/skipped.py REPORT.xml PATTERN``.

REPORT.xml is what ``pytest --junitxml`` writes. A test counts if the reason for its skip matches PATTERN, in upper
or lower case.
"""

import re
import sys
from xml.etree import ElementTree


def skipped(report: str, pattern: str) -> list[str]:
    """The skipped tests that match, each with its reason."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        for reason in case.iter("skipped"):
            if re.search(pattern, reason.get("message", ""), flags=re.IGNORECASE):
                found.append(f"{case.get('classname')}::{case.get('name')}: {reason.get('message')}")
    return found


if __name__ == "__main__":
    lines = skipped(*sys.argv[1:])
    print("\n".join(lines) or "None was skipped.")
    sys.exit(bool(lines))
