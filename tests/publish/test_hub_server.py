"""The Hub of these tests, started by hand."""

import json
import subprocess
import sys
import urllib.request

from helpers.hub import TOKEN
from helpers.paths import ROOT


def test_server_runs_alone(tmp_path):
    """Catches a Hub that only works inside this suite; benchmarks and users start it by hand."""
    script = ROOT / "tests" / "helpers" / "hub_server.py"
    command = [sys.executable, str(script), "0", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        request = urllib.request.Request(f"{url}/api/whoami-v2", headers={"Authorization": f"Bearer {TOKEN}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        assert json.load(opener.open(request))["name"] == "org"
    finally:
        process.terminate()
        process.wait(10)
