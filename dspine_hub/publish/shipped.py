"""The code every published repository carries: what lies there under which name, copied byte for byte from here."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]

# name there -> place here
SHIPPED = {
    "cache_dspine.py": PACKAGE / "cache_dspine.py",
    "configuration_dspine.py": PACKAGE / "configuration_dspine.py",
    "draft_graph_dspine.py": PACKAGE / "draft_graph_dspine.py",
    "generation_dspine.py": PACKAGE / "generation_dspine.py",
    "modeling_dspine.py": PACKAGE / "modeling_dspine.py",
    "kernels_dspine.py": PACKAGE / "kernels_dspine" / "__init__.py",
    "adjacent_injection.py": PACKAGE / "kernels_dspine" / "adjacent_injection.py",
    "injection_gate_kernels.py": PACKAGE / "kernels_dspine" / "injection_gate_kernels.py",
    "injection_kernels.py": PACKAGE / "kernels_dspine" / "injection_kernels.py",
    "candidate_walk.py": PACKAGE / "kernels_dspine" / "candidate_walk.py",
    "top_candidates.py": PACKAGE / "kernels_dspine" / "top_candidates.py",
    "transfer_tables.py": PACKAGE / "kernels_dspine" / "transfer_tables.py",
    "transition_kernels.py": PACKAGE / "kernels_dspine" / "transition_kernels.py",
    "transition_length_kernels.py": PACKAGE / "kernels_dspine" / "transition_length_kernels.py",
    "transition_scores.py": PACKAGE / "kernels_dspine" / "transition_scores.py",
    "triton_support.py": PACKAGE / "kernels_dspine" / "triton_support.py",
    "custom_generate/generate.py": PACKAGE / "custom_generate" / "generate.py",
}

# how transformers finds the code beside a config
AUTO_MAP = {
    "AutoConfig": "configuration_dspine.DSpineConfig",
    "AutoModel": "modeling_dspine.DSpineForSpeculation",
}
