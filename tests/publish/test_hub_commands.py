"""The commands `push` and `pull`: data on stdout, findings in the exit code."""

import json

from click.testing import CliRunner
from helpers.hub import REPO, head

from dspine_hub.cli.pull import command as pull_command
from dspine_hub.cli.push import command as push_command
from dspine_hub.findings import Report


def test_push_command_prints_data_on_stdout_only(server, folder, monkeypatch, tmp_path):
    """Catches a script that must parse prose, or a token or bar in its input."""
    monkeypatch.setattr("dspine_hub.publish.verify.verify_bundle", lambda bundle, target=None: Report())
    runner = CliRunner()
    dry = runner.invoke(push_command, [str(folder), REPO, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "config.json" in dry.stdout and "# A drafter" in dry.stdout and "Nothing was sent." in dry.stdout
    assert "new        config.json" in dry.stdout and REPO not in server.repositories
    result = runner.invoke(push_command, [str(folder), REPO, "--tag", "v1", "--json"])
    table = json.loads(result.stdout)
    assert table["ok"] and table["committed"] and table["tag"] == "v1" and table["commit"] == head(server)
    again = runner.invoke(push_command, [str(folder), REPO, "--quiet"])
    assert again.stdout == f"{server.url}/{REPO}/commit/{head(server)}\n" and again.stderr == ""
    out = runner.invoke(pull_command, [REPO, str(tmp_path / "out"), "--revision", "v1"])
    assert out.stdout == f"{tmp_path / 'out'}\n"


def test_push_command_fails_on_findings(server, folder):
    """Catches a broken dry run that a script takes for a good one."""
    (folder / "model.bin").write_bytes(b"x")
    result = CliRunner().invoke(push_command, [str(folder), REPO, "--dry-run", "--json"])
    assert result.exit_code == 1 and not json.loads(result.stdout)["ok"]
    result = CliRunner().invoke(push_command, [str(folder), REPO])
    assert result.exit_code == 1 and "[pickle]" in result.output and "Traceback" not in result.output
    assert server.requests == []
