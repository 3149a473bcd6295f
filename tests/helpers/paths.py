"""Places that many tests read, and what was recorded of the committed pair."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / "examples" / "mini"
# acceptance lengths of every round for HumanEval's first prompts, and the canary's drafts
RECORDED = json.loads((ROOT / "tests" / "data" / "mini_lengths.json").read_text())
