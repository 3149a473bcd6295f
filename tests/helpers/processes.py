"""Code in a process of its own."""

import json
import subprocess
import sys


def run(code, *arguments, env, cwd):
    """Run code in a fresh process and return the JSON of its last line."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
