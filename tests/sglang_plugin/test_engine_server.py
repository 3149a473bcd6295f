"""`dspine-hub serve` with a real engine, over HTTP."""

import json
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from helpers import sglang_engines
from helpers.engine_runs import (
    ENGINES,
    LIMIT,
    NEEDS_ENGINES,
    OLDEST,
    PROMPTS,
    TOKENS,
    engine_arguments,
    loop_rounds,
    reference_pair,
)
from helpers.overlays import OVERLAY_FOLDER
from helpers.paths import MINI
from transformers import AutoTokenizer

pytestmark = NEEDS_ENGINES


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT) as reply:
        return reply.read().decode()


def streamed(reply, read):
    parts = [line.removeprefix("data: ") for line in reply.splitlines() if line.startswith("data: {")]
    return "".join(read(json.loads(part)["choices"][0]) or "" for part in parts)


@pytest.fixture(scope="session")
def server(bundle, tmp_path_factory):
    """`dspine-hub serve` on the oldest release."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    flags = [part for name, value in engine_arguments().items() for part in flag_of(name, value)]
    command = ["-m", "dspine_hub", "serve", "--target", MINI / "target", "--drafter", bundle, "--port", port, *flags]
    env = sglang_engines.environment(Path(ENGINES), Path(OVERLAY_FOLDER), OLDEST)
    with (
        log.open("w") as out,
        sglang_engines.started(
            [sglang_engines.python_of(Path(ENGINES)), *command], env=env, cwd=ENGINES, stdout=out, stderr=out
        ) as process,
    ):
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + LIMIT
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
        yield url


def flag_of(name, value):
    if name in ("model_path", "speculative_algorithm"):
        return []
    flag = "--" + name.replace("_", "-")
    return ([flag] if value else []) if isinstance(value, bool) else [flag, value]


def test_completions_over_http(server):
    """Catches a server that answers otherwise than the target decodes, whole or streamed."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "target")
    expected = tokenizer.decode(loop_rounds()[1][0])
    body = {"model": "mini", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"skip_special_tokens": False}
    url = f"{server}/v1/completions"
    assert json.loads(post(url, **body))["choices"][0]["text"] == expected
    assert streamed(post(url, stream=True, **body), lambda choice: choice["text"]) == expected


def test_chat_completions_over_http(server):
    """Catches a chat template that is not applied, whole or streamed."""
    target, _ = reference_pair()
    tokenizer = AutoTokenizer.from_pretrained(MINI / "target")
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = target.generate(**ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    expected = tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
    body = {"model": "mini", "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"skip_special_tokens": False}
    url = f"{server}/v1/chat/completions"
    assert json.loads(post(url, **body))["choices"][0]["message"]["content"] == expected
    assert streamed(post(url, stream=True, **body), lambda choice: choice["delta"].get("content")) == expected
