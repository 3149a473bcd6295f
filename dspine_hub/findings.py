"""What a check found: findings that say rule, values and remedy, collected into one report."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from dspine_hub.errors import DSpineHubError

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One observation.

    Args:
        severity (`str`): `"error"` makes the report fail, `"warning"` may cost acceptance, `"info"` is worth knowing.
        rule (`str`): Short stable name, like `hidden-size`.
        message (`str`): The thing in backticks, the rule and the values.
        remedy (`str`, *optional*): The next command or edit.
    """

    severity: Severity
    rule: str
    message: str
    remedy: str | None = None


@dataclass
class Report:
    """Findings in the order they were made."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """`True` without an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    def add(self, severity: Severity, rule: str, message: str, remedy: str | None = None) -> None:
        """Append a finding."""
        self.findings.append(Finding(severity, rule, message, remedy))

    def extend(self, other: "Report") -> None:
        """Append another report's findings."""
        self.findings.extend(other.findings)

    def raise_for_errors(self, rule: str, remedy: str = "") -> None:
        """Raise `DSpineHubError` when there is an error: `rule`, a line for each, `remedy`."""
        errors = [line for line in self.lines() if line.startswith("error")]
        if errors:
            raise DSpineHubError("\n".join([f"{rule}:", *errors, *([remedy] if remedy else [])]))

    def as_dict(self) -> dict:
        """Return `{"ok": bool, "findings": [...]}` for JSON."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def lines(self) -> list[str]:
        """Render one line a finding, remedies behind an arrow."""
        return [
            f"{finding.severity}: [{finding.rule}] {finding.message}"
            + (f" -> {finding.remedy}" if finding.remedy else "")
            for finding in self.findings
        ]
