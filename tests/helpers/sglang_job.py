"""Run one engine in a process of its own: `python sglang_job.py JOB.json RESULT.json`.

A job is `{"engine": {...}, "calls": [{"input_ids": ..., "sampling_params": ...}]}`. The result holds, for each call,
token ids and the rounds SGLang counted. It is written before the engine ends, whose end may take this process along.
"""

import json
import sys


def main(job_file, result_file):
    import sglang

    with open(job_file) as file:
        job = json.load(file)
    engine = sglang.Engine(**job["engine"])
    results = []
    for call in job["calls"]:
        outputs = engine.generate(**call)
        results.append(
            [
                {
                    "ids": output["output_ids"],
                    "rounds": output["meta_info"].get("spec_verify_ct"),
                    "accept_length": output["meta_info"].get("spec_accept_length"),
                }
                for output in outputs
            ]
        )
    with open(result_file, "w") as file:
        json.dump(results, file)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
