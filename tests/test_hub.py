"""Push, pull and diff over real HTTP against a Hub on loopback, and everything that can go wrong on the way."""

import errno
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import CommitOperationAdd, HfApi, constants, snapshot_download
from loopback_hub import Blob, HubServer, Writing, copy_repository
from safetensors.torch import load_file, save_file
from test_receipts import RECEIPT

from dspine_hub.cli.diff import diff as diff_command
from dspine_hub.cli.pull import pull as pull_command
from dspine_hub.cli.push import push as push_command
from dspine_hub.errors import DSpineHubError
from dspine_hub.findings import Report
from dspine_hub.folders import file_sha256
from dspine_hub.publish import hub
from dspine_hub.publish.bundle import build_bundle
from dspine_hub.publish.cards import PLACEHOLDER
from dspine_hub.publish.hub_client import blob_id

ROOT = Path(__file__).resolve().parents[1]
MINI = ROOT / "examples" / "mini"
REPO = "org/mini-dspine"
TOKEN = "hf_owner"
CARD = "---\nbase_model: Qwen/Qwen3-8B\nlicense: apache-2.0\ntags: [dspine]\n---\n# A drafter\n"
OLAH = os.environ.get("DSPINE_OLAH")

# the client's own, for every upload
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def passes(folder):
    """Stand in for the bundle's own checks, which have tests of their own."""
    return Report()


def environment(server, home, **extra):
    """Environment of a process that only knows this Hub."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    fields = {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    return {**kept, **fields, "NO_PROXY": "127.0.0.1", "PYTHONPATH": "", **extra}


def run(code, *arguments, env, cwd):
    """Run code in a fresh process and return the JSON of its last line."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def use(monkeypatch, server, home):
    """Point this process at a Hub; the suite runs offline otherwise."""
    for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True), ("HF_HUB_CACHE", str(home))):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return server


@pytest.fixture
def server(tmp_path, monkeypatch):
    with HubServer(tmp_path / "server", part_size=3_000_000) as running:
        yield use(monkeypatch, running, tmp_path / "cache")


@pytest.fixture
def sleeps(monkeypatch):
    """Record waits instead of waiting, in the client and here."""
    waits = []
    shim = types.SimpleNamespace(**{**vars(time), "sleep": waits.append})
    monkeypatch.setattr("huggingface_hub.utils._http.time", shim)
    monkeypatch.setattr("dspine_hub.publish.hub_client.time", shim)
    return waits


@pytest.fixture
def folder(tmp_path):
    """A small folder with the kinds of files a bundle has."""
    path = tmp_path / "bundle"
    (path / "receipts").mkdir(parents=True)
    (path / "README.md").write_text(CARD)
    (path / "config.json").write_text(json.dumps({"block_size": 8, "target": {"id": "Qwen/Qwen3-8B"}}))
    (path / "receipts" / "mini.json").write_text(json.dumps(RECEIPT))
    write_shards(path, 2)
    return seal(path)


def write_shards(path, count, seed=0):
    """Write `count` shards of 1 MB and their index."""
    for old in path.glob("model*"):
        old.unlink()
    generator, weights = torch.Generator().manual_seed(seed), {}
    for shard in range(count):
        name = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        save_file({f"layers.{shard}.weight": torch.rand(256, 1024, generator=generator)}, path / name)
        weights[f"layers.{shard}.weight"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def seal(path):
    """Write the hashes of a folder anew."""
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    hashes = {name: file_sha256(path / name) for name in names if name != "provenance.json"}
    (path / "provenance.json").write_text(json.dumps({"dspine_hub": "0", "files": hashes}))
    return path


def names_in(path):
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def head(server):
    repository = server.repositories.get(REPO)
    return None if repository is None else repository.head


def assert_holds(server, path, revision="main"):
    """Compare a revision with a folder by the Hub's own checksums."""
    files = server.repositories[REPO].files(revision)
    assert set(files) - {".gitattributes"} == names_in(path)
    for name in names_in(path):
        blob = files[name]
        assert blob.etag == (file_sha256(path / name) if blob.sha256 else blob_id((path / name).read_bytes())), name


# the published drafter, as its users load it

DRAFTS = """
import json, sys
sys.modules["dspine_hub"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
target_folder, sources, custom, save_to = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
tokenizer = AutoTokenizer.from_pretrained(target_folder)
target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
ids = tokenizer("def add(a, b):\\n", return_tensors="pt")["input_ids"]
plain = target.generate(ids, max_new_tokens=24, do_sample=False)
report = {}
for name, (location, revision) in sources.items():
    drafter = AutoModel.from_pretrained(location, revision=revision, trust_remote_code=True, dtype=torch.float32)
    module = sys.modules[type(drafter).__module__]
    drafted = drafter.bind(target, tokenizer).spec_generate(
        target, ids, 24, temperature=0.0, return_dict_in_generate=True)
    report[name] = {
        "module": module.__name__.split(".")[0],
        "marker": getattr(module, "MARKER", None),
        "weights": sum(float(tensor.double().sum()) for tensor in drafter.state_dict().values()),
        "lengths": drafted.statistics.lengths,
        "lossless": torch.equal(plain, drafted.sequences),
    }
    if name == custom:
        output = target.generate(ids, max_new_tokens=24, do_sample=False, custom_generate=location, drafter=drafter,
            trust_remote_code=True)
        report[name]["custom_generate"] = torch.equal(plain, output)
    if save_to and name == "v1":
        drafter.save_pretrained(save_to)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    return build_bundle(MINI / "drafter", tmp_path_factory.mktemp("mini") / "bundle")


@pytest.fixture(scope="module")
def published(mini, tmp_path_factory):
    """The mini bundle at tag v1; then main with other code and other weights."""
    place = tmp_path_factory.mktemp("published")
    with HubServer(place / "server") as server, pytest.MonkeyPatch.context() as monkeypatch:
        use(monkeypatch, server, place / "cache")
        hub.push(mini, REPO, tag="v1", check=passes)
        later = place / "later"
        shutil.copytree(mini, later)
        with (later / "modeling_dspine.py").open("a") as file:
            file.write('\nMARKER = "main"\n')
        tensors = load_file(later / "model.safetensors")
        tensors["norm.weight"] = tensors["norm.weight"] * 1.5
        save_file(tensors, later / "model.safetensors", metadata={"format": "pt"})
        hub.push(seal(later), REPO, check=passes)
        copy_repository(server, REPO, "someone/fork")
        yield server


@pytest.fixture(scope="module")
def loaded(published, mini, tmp_path_factory):
    """Reports of two fresh processes: local, tag and main; then what the first saved, and a fork."""
    place = tmp_path_factory.mktemp("loaded")
    env = environment(published, place / "home")
    sources = {"local": [str(mini), "main"], "v1": [REPO, "v1"], "main": [REPO, "main"]}
    saved = place / "saved"
    report = run(DRAFTS, MINI / "target", json.dumps(sources), "main", saved, env=env, cwd=place)
    sources = {"saved": [str(saved), "main"], "fork": ["someone/fork", "v1"]}
    env = environment(published, place / "other-home")
    report |= run(DRAFTS, MINI / "target", json.dumps(sources), "fork", "", env=env, cwd=place)
    return report


def test_published_tag_drafts_as_the_local_bundle(loaded):
    """Catches a file lost or changed on the way, and code that needs this package."""
    assert loaded["v1"]["module"] == "transformers_modules"
    assert loaded["v1"] == {**loaded["local"], "module": "transformers_modules"}
    assert loaded["v1"]["lossless"] and max(loaded["v1"]["lengths"]) > 1


def test_tag_keeps_its_code_and_weights_when_main_moves(loaded):
    """Catches `auto_map` following main (transformers#18537) and a tag that is not a commit of its own."""
    assert loaded["main"]["marker"] == "main" and loaded["v1"]["marker"] is None
    assert loaded["main"]["weights"] != loaded["v1"]["weights"]


def test_custom_generate_runs_from_the_repository(loaded):
    """Catches a `custom_generate/` that is missing or needs its neighbours."""
    assert loaded["main"]["custom_generate"] and loaded["fork"]["custom_generate"]


@pytest.mark.parametrize("name", ["saved", "fork"])
def test_saved_and_forked_copies_draft_alike(loaded, name):
    """Catches a re-saved model without its code (transformers#24737) and a fork bound to its origin."""
    for field in ("weights", "lengths", "lossless", "marker", "module"):
        assert loaded[name][field] == loaded["v1"][field], field


def test_pull_of_a_tag_passes_verify(published, mini, tmp_path, monkeypatch):
    """Catches a pull of main instead of the tag, and a pulled folder that is no bundle any more."""
    from dspine_hub.publish.verify import verify

    use(monkeypatch, published, tmp_path / "cache")
    pulled = hub.pull(REPO, tmp_path / "pulled", revision="v1")
    assert names_in(pulled) == names_in(mini) | {".gitattributes"}
    # the card alone differs: it names its repository
    assert set(hub.diff(pulled, mini).files) == {"README.md"}
    assert REPO in (pulled / "README.md").read_text() and PLACEHOLDER not in (pulled / "README.md").read_text()
    report = verify(pulled)
    assert report.ok, report.lines()


SNAPSHOT = """
import json, sys
from huggingface_hub import snapshot_download
print(json.dumps(snapshot_download(sys.argv[1], revision="v1", local_dir=sys.argv[2])))
"""
OLAH_FOUND = OLAH is not None or importlib.util.find_spec("olah") is not None


@pytest.mark.skipif(not OLAH_FOUND, reason="install olah, or set DSPINE_OLAH to a folder that holds it")
def test_independent_mirror_reads_what_was_pushed(published, mini, tmp_path):
    """Catches a repository that only our own server and client understand."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    upstream, own = published.url.removeprefix("http://"), f"127.0.0.1:{port}"
    options = {"host": "127.0.0.1", "port": port, "repos-path": tmp_path / "repos", "log-path": tmp_path / "logs"}
    options |= {"hf-scheme": "http", "hf-netloc": upstream, "hf-lfs-netloc": upstream, "mirror-scheme": "http"}
    options |= {"mirror-netloc": own, "mirror-lfs-netloc": own}
    command = [sys.executable, "-m", "olah.server", *(f"--{key}={value}" for key, value in options.items())]
    env = environment(published, tmp_path / "home", PYTHONPATH=OLAH or "")
    with (tmp_path / "log").open("w") as log:
        mirror = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_for(lambda: socket.create_connection(("127.0.0.1", port), 1).close(), 20)
        env = {**env, "HF_ENDPOINT": f"http://{own}", "PYTHONPATH": ""}
        env.pop("HF_TOKEN")
        run(SNAPSHOT, REPO, tmp_path / "copy", env=env, cwd=tmp_path)
    finally:
        mirror.terminate()
        mirror.wait(10)
    # the card alone differs: it names its repository
    for name in names_in(mini) - {"README.md"}:
        assert file_sha256(tmp_path / "copy" / name) == file_sha256(mini / name), name


def wait_for(attempt, seconds):
    """Repeat until it no longer raises."""
    end = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except (OSError, AssertionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


# a push, step by step


def test_push_makes_one_commit_then_the_tag(server, folder):
    """Catches several commits for one release, and a tag on anything but the checked commit."""
    result = hub.push(folder, REPO, tag="v1", message="First", check=passes)
    assert_holds(server, folder)
    repository = server.repositories[REPO]
    assert len(server.seen("POST", "/commit/")) == 1
    assert repository.commits[repository.head].title == "First"
    assert repository.tags == {"v1": repository.head} and result.commit == repository.head
    assert {entry.path: entry.state for entry in result.files} == dict.fromkeys(names_in(folder), "new")
    matches = [re.search(r"validate|/create$|preupload|batch|/commit/|/tag/", r.path) for r in server.requests]
    steps = list(dict.fromkeys(match[0].strip("/") for match in matches if match))
    assert steps == ["validate", "create", "preupload", "batch", "commit", "tag"]


def test_unchanged_push_sends_no_content_and_makes_the_missing_tag(server, folder):
    """Catches an empty commit, a second upload, and a release left untagged by an interruption."""
    first = hub.push(folder, REPO, check=passes)
    count = len(server.requests)
    again = hub.push(folder, REPO, tag="v1", check=passes)
    assert not again.committed and again.commit == first.commit
    assert server.repositories[REPO].tags == {"v1": first.commit}
    sent = server.requests[count:]
    assert not [r for r in sent if re.search(r"/commit/|/preupload/|/objects/", r.path)]


def test_changed_file_alone_is_uploaded(server, folder):
    """Catches an upload of every shard for a change of one."""
    hub.push(folder, REPO, check=passes)
    count = len(server.requests)
    save_file({"layers.0.weight": torch.zeros(256, 1024)}, folder / "model-00001-of-00002.safetensors")
    result = hub.push(seal(folder), REPO, check=passes)
    puts = [request for request in server.requests[count:] if request.method == "PUT"]
    assert len(puts) == 1 and file_sha256(folder / "model-00001-of-00002.safetensors") in puts[0].path
    changed = {entry.path for entry in result.files if entry.state == "changed"}
    assert changed == {"model-00001-of-00002.safetensors", "provenance.json"}
    assert_holds(server, folder)


def test_fewer_shards_leave_no_ghosts(server, folder):
    """Catches old shards beside new ones, which a loader without the index would read."""
    write_shards(folder, 3)
    hub.push(seal(folder), REPO, check=passes)
    write_shards(folder, 1)
    result = hub.push(seal(folder), REPO, check=passes)
    assert len([entry for entry in result.files if entry.state == "deleted"]) == 3
    assert_holds(server, folder)
    assert len(server.seen("POST", "/commit/")) == 2


def test_parts_and_progress_cover_every_byte(server, folder):
    """Catches a file object that the client's slices or retries cannot rewind, and bars that end short."""
    save_file({"big": torch.rand(2000, 1024)}, folder / "model.safetensors")
    seen = {}
    hub.push(
        seal(folder), REPO, check=passes, progress=lambda name, sent, size: seen.setdefault(name, []).append(sent)
    )
    assert_holds(server, folder)
    assert len(server.seen("PUT", r"/objects/\w+/\d+$")) == 3
    assert set(seen) == {name for name in names_in(folder) if name.endswith(".safetensors")}
    for name, sent in seen.items():
        assert max(sent) == (folder / name).stat().st_size


def test_many_files_and_pages(server, folder):
    """Catches a listing cut at its first page, which would delete or re-send the rest."""
    server.page_size = 5
    (folder / "notes").mkdir()
    for number in range(30):
        (folder / "notes" / f"{number}.json").write_text(str(number))
    hub.push(seal(folder), REPO, check=passes)
    assert_holds(server, folder)
    assert not hub.push(folder, REPO, check=passes).committed


def test_ignore_file_of_the_repository_leaves_nothing_out(server, folder):
    """Catches a release without its receipts because someone once ignored JSON."""
    hub.push(folder, REPO, check=passes)
    repository = server.repositories[REPO]
    tree = {**repository.files(), ".gitignore": Blob(7, b"*.json\n")}
    repository.branches["main"] = repository.commit(repository.head, tree, "ignore")
    (folder / "config.json").write_text("{}")
    hub.push(seal(folder), REPO, check=passes)
    assert_holds(server, folder)


def test_commit_that_holds_other_files_is_not_tagged(server, folder, monkeypatch):
    """Catches a release taken for good because the Hub said 200."""
    apply = Writing._apply

    def forget_one(handler, tree, key, value):
        if value["path"] != "config.json":
            apply(handler, tree, key, value)

    monkeypatch.setattr(Writing, "_apply", forget_one)
    with pytest.raises(DSpineHubError, match=r"got others at commit \w{12}: \['config.json'\]"):
        hub.push(folder, REPO, tag="v1", check=passes)
    assert server.repositories[REPO].tags == {}


def test_pull_request_leaves_main_alone(server, folder):
    """Catches a proposal that publishes."""
    hub.push(folder, REPO, check=passes)
    before = head(server)
    (folder / "config.json").write_text("{}")
    result = hub.push(seal(folder), REPO, pr=True, check=passes)
    assert head(server) == before
    assert result.pull_request.endswith("/discussions/1") and result.commit != before
    assert_holds(server, folder, "refs/pr/1")


def test_reader_of_a_repository_may_propose(server, folder, monkeypatch):
    """Catches a pull request that asks for rights it does not need, and a refusal without that way out."""
    hub.push(folder, REPO, check=passes)
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(DSpineHubError, match=r"`dspine-hub push \S+ org/mini-dspine --pr`$"):
        hub.push(seal(folder), REPO, check=passes)
    assert hub.push(folder, REPO, pr=True, check=passes).pull_request is not None


def test_tag_elsewhere_is_refused_before_any_upload(server, folder):
    """Catches a release whose tag names other files, noticed after hours of upload."""
    hub.push(folder, REPO, tag="v1", check=passes)
    (folder / "config.json").write_text("{}")
    write_shards(folder, 1, seed=5)
    before, count = head(server), len(server.requests)
    with pytest.raises(DSpineHubError, match="`tag` must be new"):
        hub.push(seal(folder), REPO, tag="v1", check=passes)
    assert head(server) == before
    assert not [r for r in server.requests[count:] if re.search(r"/preupload/|/objects/|/commit/", r.path)]


def test_private_repository(server, folder):
    """Catches weights meant to be private in a repository that was public all along."""
    hub.push(folder, REPO, private=True, check=passes)
    assert server.repositories[REPO].private
    hub.push(folder, "org/open", check=passes)
    with pytest.raises(DSpineHubError, match="exists and is public"):
        hub.push(folder, "org/open", private=True, check=passes)


def test_dry_run_sends_nothing_and_lists_everything(server, folder):
    """Catches a dry run that creates the repository, or hides findings behind an exception."""

    def check(path):
        report = Report()
        report.add("error", "finite", "`norm` must hold finite numbers.")
        return report

    result = hub.push(folder, REPO, tag="v1", dry_run=True, check=check)
    assert server.requests == []
    assert {entry.path: entry.size for entry in result.files} == {
        name: (folder / name).stat().st_size for name in names_in(folder)
    }
    assert not result.report.ok and result.card == CARD and result.commit is None


def test_failed_check_sends_nothing(server, folder):
    """Catches a broken drafter in public."""

    def check(path):
        report = Report()
        report.add("error", "finite", "`norm` must hold finite numbers.")
        return report

    with pytest.raises(DSpineHubError, match=r"(?s)`norm` must hold finite.*--dry-run`$"):
        hub.push(folder, REPO, check=check)
    assert server.requests == []


def test_receipt_of_other_weights_is_pointed_out(server, folder):
    """Catches a number beside weights it was not measured with."""
    report = hub.push(folder, REPO, dry_run=True, check=passes).report
    assert [finding.rule for finding in report.findings] == ["receipt-weights"]
    assert report.ok


# what must not be published: change -> rule


def _link_out(path):
    outside = path.parent / "outside.json"
    outside.write_text("{}")
    (path / "outside.json").symlink_to(outside)


def _link_folder(path):
    (path.parent / "elsewhere").mkdir()
    (path / "elsewhere").symlink_to(path.parent / "elsewhere")


def _with_card(text):
    return lambda path: (path / "README.md").write_text(text)


def _file(name):
    def change(path):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")

    return change


REFUSED = {
    "pickle-bin": (_file("pytorch_model.bin"), "pickle"),
    "pickle-pt": (_file("receipts/optimizer.PT"), "pickle"),
    "pickle-ckpt": (_file("last.ckpt"), "pickle"),
    "hidden-env": (_file(".env"), "hidden-file"),
    "hidden-git": (_file(".git/config"), "hidden-file"),
    "hidden-nested": (_file("receipts/.secret"), "hidden-file"),
    "pycache": (_file("__pycache__/kernels.cpython-311.pyc"), "cache-file"),
    "backslash": (_file("a\\b.json"), "name"),
    "newline": (_file("a\nb.json"), "name"),
    "case": (_file("Config.json"), "name-case"),
    "link-out": (_link_out, "link"),
    "link-folder": (_link_folder, "link"),
    "link-dangling": (lambda path: (path / "x.json").symlink_to("nowhere"), "link"),
    "no-card": (lambda path: (path / "README.md").unlink(), "card"),
    "no-metadata": (_with_card("# Drafter\n"), "front-matter"),
    "broken-yaml": (_with_card("---\nbase_model: [a\n---\n"), "front-matter"),
    "list-yaml": (_with_card("---\n- a\n---\n"), "front-matter"),
    "local-base-model": (_with_card("---\nbase_model: /data/Qwen3-8B\nlicense: mit\n---\n"), "base-model"),
    "relative-base-model": (_with_card("---\nbase_model: ./Qwen3-8B\nlicense: mit\n---\n"), "base-model"),
    "deep-base-model": (_with_card("---\nbase_model: out/run/Qwen3-8B\nlicense: mit\n---\n"), "base-model"),
    "windows-base-model": (_with_card("---\nbase_model: C:\\Qwen3-8B\nlicense: mit\n---\n"), "base-model"),
    "local-dataset": (_with_card("---\ndatasets: [org/data, ../train.jsonl]\nlicense: mit\n---\n"), "datasets"),
    "invented-relation": (_with_card("---\nbase_model_relation: draft\nlicense: mit\n---\n"), "base-model-relation"),
    "bad-license": (_with_card("---\nlicense: Apache License 2.0\n---\n"), "license"),
    "bad-tags": (_with_card("---\ntags: [1, ok]\nlicense: mit\n---\n"), "metadata"),
}


@pytest.mark.parametrize(("change", "rule"), REFUSED.values(), ids=REFUSED)
def test_unfit_folder_is_refused_and_nothing_is_sent(server, folder, change, rule):
    """Catches code or secrets in public, names other systems lose, and a 400 after a long upload (hub#1927)."""
    change(folder)
    result = hub.push(folder, REPO, dry_run=True, check=passes)
    assert [finding.rule for finding in result.report.findings if finding.severity == "error"] == [rule]
    with pytest.raises(DSpineHubError, match=rf"\[{rule}\]"):
        hub.push(folder, REPO, check=passes)
    assert server.requests == []


def test_hub_refuses_a_card_before_the_repository_exists(server, folder, monkeypatch):
    """Catches metadata only the Hub can judge, judged after the upload."""
    (folder / "README.md").write_text("---\nbase_model: ./local\n---\n")
    monkeypatch.setattr(hub, "check_folder", lambda folder, card: passes(folder))
    with pytest.raises(DSpineHubError, match=r'"base_model" with value "./local" is not valid'):
        hub.push(seal(folder), REPO, check=passes)
    assert [request.path for request in server.requests] == ["/api/validate-yaml"]


def test_cached_snapshot_made_of_links_is_published_as_files(server, folder, tmp_path):
    """Catches link targets sent as text, and the refusal of the folder users have."""
    hub.push(folder, REPO, check=passes)
    snapshot = Path(snapshot_download(REPO, endpoint=server.url))
    assert (snapshot / "config.json").is_symlink()
    hub.push(snapshot, "org/copy", check=passes)
    files = server.repositories["org/copy"].files()
    assert {name: blob.etag for name, blob in files.items()} == {
        name: blob.etag for name, blob in server.repositories[REPO].files().items()
    }


BAD_ARGUMENTS = {
    "no-namespace": ({"repo_id": "mini"}, "named like `org/name`"),
    "path": ({"repo_id": "./out/mini"}, "named like `org/name`"),
    "space": ({"repo_id": "org/my drafter"}, "named like `org/name`"),
    "tag-and-pr": ({"tag": "v1", "pr": True}, "exclude each other"),
    "bad-tag": ({"tag": "v 1"}, "`tag` must be a name"),
    "no-folder": ({"folder": "nowhere"}, "must name a bundle folder"),
}


@pytest.mark.parametrize(("fields", "match"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_argument_is_refused_and_nothing_is_sent(server, folder, fields, match):
    """Catches a typo that becomes a repository."""
    with pytest.raises(DSpineHubError, match=match):
        hub.push(**{"folder": folder, "repo_id": REPO, "check": passes, **fields})
    assert server.requests == []


# faults that pass: (method, path, fault)

PASSING = {
    "503-validate": ("POST", "/api/validate-yaml", {"status": 503}),
    "503-create": ("POST", "/api/repos/create", {"status": 503}),
    "503-info": ("GET", "/revision/main", {"status": 503}),
    "503-tree": ("GET", "/tree/", {"status": 503}),
    "503-preupload": ("POST", "/preupload/", {"status": 503}),
    "503-batch": ("POST", "/objects/batch", {"status": 503}),
    "503-put": ("PUT", "/objects/", {"status": 503}),
    "500-put": ("PUT", "/objects/", {"status": 500}),
    "503-commit": ("POST", "/commit/", {"status": 503}),
    "503-tag": ("POST", "/tag/", {"status": 503}),
    "429-put": ("PUT", "/objects/", {"status": 429, "headers": {"Retry-After": "7"}}),
    "429-commit": ("POST", "/commit/", {"status": 429, "headers": {"Retry-After": "7"}}),
    "429-tag": ("POST", "/tag/", {"status": 429, "headers": {"Retry-After": "7"}}),
    "dropped-put": ("PUT", "/objects/", {"drop_after": 300_000}),
    "dropped-preupload": ("POST", "/preupload/", {"drop_after": 10}),
}


@pytest.mark.parametrize(("method", "pattern", "fields"), PASSING.values(), ids=PASSING)
def test_passing_fault_is_survived(server, folder, sleeps, method, pattern, fields):
    """Catches a release lost to one refused or broken request, a second commit, and an ignored Retry-After."""
    fault = server.fault(method, pattern, **fields)
    hub.push(folder, REPO, tag="v1", check=passes)
    assert fault.times == 0 and sleeps
    assert_holds(server, folder, "v1")
    assert len([r for r in server.seen("POST", "/commit/") if r.status == 200]) == 1
    if "headers" in fields:
        assert max(sleeps) >= 7


# faults that stay: (method, path, fault, message)

LASTING = {
    "401-info": ("GET", "/revision/main", {"status": 401}, r"does not accept this token.*`hf auth login`$"),
    "401-preupload": ("POST", "/preupload/", {"status": 401}, r"does not accept this token.*`hf auth login`$"),
    "403-preupload": ("POST", "/preupload/", {"status": 403}, r"may not do that.*--pr`$"),
    "403-put": ("PUT", "/objects/", {"status": 403}, r"may not do that.*--pr`$"),
    "403-commit": ("POST", "/commit/", {"status": 403}, r"may not do that.*--pr`$"),
    "404-preupload": ("POST", "/preupload/", {"status": 404}, r"no such repository.*`hf auth whoami`$"),
    "409-commit": ("POST", "/commit/", {"status": 409}, r"something else under this name.*mini-dspine`$"),
    "412-commit": ("POST", "/commit/", {"status": 412}, r"someone else committed.*`dspine-hub push \S+ \S+`$"),
    "413-put": ("PUT", "/objects/", {"status": 413}, r"larger than this Hub accepts.*`dspine-hub push \S+ \S+`$"),
    "429-commit": (
        "POST",
        "/commit/",
        {"status": 429, "headers": {"Retry-After": "30"}},
        r"Wait 30 s, then run: `dspine-hub push \S+ \S+`$",
    ),
    "500-commit": ("POST", "/commit/", {"status": 500}, r"the Hub is unavailable.*`dspine-hub push \S+ \S+`$"),
    "503-put": ("PUT", "/objects/", {"status": 503}, r"the Hub is unavailable.*`dspine-hub push \S+ \S+`$"),
    "dropped-put": ("PUT", "/objects/", {"drop_after": 1000}, r"connection failed.*`dspine-hub push \S+ \S+`$"),
    "dropped-commit": ("POST", "/commit/", {"drop_after": 10}, r"connection failed.*`dspine-hub push \S+ \S+`$"),
}


@pytest.mark.parametrize(("method", "pattern", "fields", "match"), LASTING.values(), ids=LASTING)
def test_lasting_fault_changes_nothing_and_names_the_remedy(server, folder, sleeps, method, pattern, fields, match):
    """Catches half a release, a raw traceback, a token in a message, and a re-run that does not complete."""
    write_shards(folder, 1)
    hub.push(seal(folder), REPO, check=passes)
    before = head(server)
    write_shards(folder, 2, seed=3)
    fault = server.fault(method, pattern, times=100, message=f"no, Bearer {TOKEN}", **fields)
    with pytest.raises(DSpineHubError, match=f"(?is){match}") as caught:
        hub.push(seal(folder), REPO, check=passes)
    assert head(server) == before and TOKEN not in str(caught.value)
    fault.times = 0
    hub.push(folder, REPO, check=passes)
    assert_holds(server, folder)


def test_refused_tag_is_made_by_the_next_run(server, folder, sleeps):
    """Catches a second commit, or a release that stays without its tag."""
    fault = server.fault("POST", "/tag/", status=503, times=100)
    with pytest.raises(DSpineHubError, match=r"unavailable.*`dspine-hub push \S+ \S+ --tag v1`$"):
        hub.push(folder, REPO, tag="v1", check=passes)
    assert_holds(server, folder)
    made, fault.times = head(server), 0
    assert not hub.push(folder, REPO, tag="v1", check=passes).committed
    assert server.repositories[REPO].tags == {"v1": made}


def test_lost_answer_to_a_commit_is_no_second_commit(server, folder):
    """Catches a blind retry: the commit was made, only its answer was lost."""
    server.fault("POST", "/commit/", mute=True)
    with pytest.raises(DSpineHubError, match=r"connection failed.*`dspine-hub push \S+ \S+ --tag v1`$"):
        hub.push(folder, REPO, tag="v1", check=passes)
    assert_holds(server, folder)
    made = head(server)
    assert not hub.push(folder, REPO, tag="v1", check=passes).committed
    assert server.repositories[REPO].tags == {"v1": made}
    assert len(server.seen("POST", "/commit/")) == 1


def test_stale_parent_is_refused(server, folder, monkeypatch):
    """Catches a push that overwrites what someone committed while it uploaded."""
    hub.push(folder, REPO, check=passes)
    upload = HfApi.preupload_lfs_files

    def upload_while_main_moves(api, *arguments, **keywords):
        upload(api, *arguments, **keywords)
        repository = server.repositories[REPO]
        repository.branches["main"] = repository.commit(repository.head, repository.files(), "theirs")

    monkeypatch.setattr(HfApi, "preupload_lfs_files", upload_while_main_moves)
    (folder / "config.json").write_text("{}")
    with pytest.raises(DSpineHubError, match="(?i)someone else committed"):
        hub.push(seal(folder), REPO, tag="v2", check=passes)
    repository = server.repositories[REPO]
    assert repository.commits[repository.head].title == "theirs" and repository.tags == {}


PUSH = """
import sys
from dspine_hub.findings import Report
from dspine_hub.publish.hub import push
push(sys.argv[1], sys.argv[2], tag="v1", check=lambda folder: Report())
print("{}")
"""


def test_killed_before_the_commit_changes_nothing(server, folder, tmp_path):
    """Catches a release that is half there, and blobs uploaded twice."""
    hub.push(folder, REPO, check=passes)
    before = head(server)
    write_shards(folder, 3, seed=9)
    seal(folder)
    fault = server.fault("POST", "/commit/", hold=True)
    env = environment(server, tmp_path / "home", PYTHONPATH=str(ROOT))
    process = subprocess.Popen([sys.executable, "-c", PUSH, str(folder), REPO], env=env, cwd=tmp_path)
    assert fault.reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    fault.release.set()
    assert head(server) == before and server.repositories[REPO].tags == {}
    count = len(server.requests)
    hub.push(folder, REPO, tag="v1", check=passes)
    assert_holds(server, folder, "v1")
    assert not [request for request in server.requests[count:] if request.method == "PUT"]


def test_killed_in_an_upload_changes_nothing(server, folder, tmp_path):
    """Catches a cut-off blob taken for a whole one."""
    fault = server.fault("PUT", "/objects/", hold=True, times=2)
    env = environment(server, tmp_path / "home", PYTHONPATH=str(ROOT))
    process = subprocess.Popen([sys.executable, "-c", PUSH, str(folder), REPO], env=env, cwd=tmp_path)
    assert fault.reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    fault.release.set()
    assert set(server.repositories[REPO].files()) == {".gitattributes"}
    hub.push(folder, REPO, check=passes)
    assert_holds(server, folder)


def test_server_without_xet_names_the_way_around(server, folder, monkeypatch):
    """Catches the client's dead end on self-hosted Hubs (huggingface_hub#4786)."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(
        DSpineHubError, match=r"offers no xet storage.*`HF_HUB_DISABLE_XET=1 dspine-hub push \S+ \S+`$"
    ):
        hub.push(folder, REPO, check=passes)
    assert set(server.repositories[REPO].files()) == {".gitattributes"}


PULL = """
import sys
from dspine_hub.publish.hub import pull
print('"' + str(pull(sys.argv[1], sys.argv[2], revision="v1")) + '"')
"""


def test_xet_round_trip(folder, tmp_path):
    """Catches hashes that only the LFS path computes; each process ends, for the store is locked while one runs."""
    pytest.importorskip("hf_xet")
    with HubServer(tmp_path / "server", xet=True) as server:
        env = environment(server, tmp_path / "home", PYTHONPATH=str(ROOT), HF_HUB_DISABLE_XET="0")
        run(PUSH, folder, REPO, env=env, cwd=tmp_path)
        assert server.seen("GET", "/xet-write-token/") and not server.seen("PUT")
        assert_holds(server, folder, "v1")
        run(PULL, REPO, tmp_path / "by-xet", env=env, cwd=tmp_path)
        assert server.seen("GET", "/xet-read-token/")
        run(PULL, REPO, tmp_path / "by-http", env={**env, "HF_HUB_DISABLE_XET": "1"}, cwd=tmp_path)
    for place in ("by-xet", "by-http"):
        assert hub.diff(folder, tmp_path / place).identical


# pull


def test_pull_appears_whole_or_not_at_all(server, folder, tmp_path, sleeps):
    """Catches a folder that looks complete after a broken download, and litter beside it."""
    hub.push(folder, REPO, check=passes)
    fault = server.fault("GET", r"/resolve/.*00002-of", status=403, times=100)
    place = tmp_path / "place"
    with pytest.raises(DSpineHubError, match=r"may not do that.*`hf auth login`$"):
        hub.pull(REPO, place / "out")
    assert list(place.iterdir()) == []
    fault.times = 0
    assert names_in(hub.pull(REPO, place / "out")) == names_in(folder) | {".gitattributes"}
    assert [path.name for path in place.iterdir()] == ["out"]


def test_pull_refuses_bytes_damaged_on_the_way(server, folder, tmp_path):
    """Catches damage that sizes do not show."""
    hub.push(folder, REPO, check=passes)
    stored = server.object(file_sha256(folder / "model-00001-of-00002.safetensors"))
    stored.write_bytes(b"\0" * stored.stat().st_size)
    with pytest.raises(DSpineHubError, match="differs from what the Hub announced"):
        hub.pull(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pull_refuses_a_repository_edited_behind_its_hashes(server, folder, tmp_path):
    """Catches code or weights replaced after they were checked; the card alone may change."""
    (folder / "README.md").write_text(CARD + "edited")
    hub.push(folder, REPO, check=passes)
    hub.pull(REPO, tmp_path / "card")
    (folder / "config.json").write_text("{}")
    hub.push(folder, REPO, check=passes)
    with pytest.raises(DSpineHubError, match="`config.json` differs from its hash in `provenance.json`"):
        hub.pull(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()


PULL_REFUSED = {
    "missing-repository": ("org/nothing", {}, r"no such repository.*`hf auth whoami`$"),
    "missing-revision": (REPO, {"revision": "v9"}, r"no such repository or revision.*`hf auth whoami`$"),
    "bad-name": ("nothing", {}, r"named like `org/name`"),
}


@pytest.mark.parametrize(("repo_id", "fields", "match"), PULL_REFUSED.values(), ids=PULL_REFUSED)
def test_pull_of_nothing_is_readable(server, folder, tmp_path, repo_id, fields, match):
    """Catches a traceback for a typo."""
    hub.push(folder, REPO, check=passes)
    with pytest.raises(DSpineHubError, match=f"(?is){match}"):
        hub.pull(repo_id, tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


def test_pull_keeps_a_taken_folder(server, folder):
    """Catches an overwritten checkpoint."""
    before = names_in(folder)
    with pytest.raises(DSpineHubError, match="`dest` must not exist yet"):
        hub.pull(REPO, folder)
    assert names_in(folder) == before and server.requests == []


def test_private_repository_needs_its_token(server, folder, tmp_path, monkeypatch):
    """Catches a private drafter served to strangers, and an error that tells them it exists."""
    hub.push(folder, REPO, private=True, check=passes)
    assert hub.pull(REPO, tmp_path / "mine").is_dir()
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(DSpineHubError, match="(?i)no such repository or revision, or it is private"):
        hub.pull(REPO, tmp_path / "theirs")
    assert hub.pull(REPO, tmp_path / "given", token=TOKEN).is_dir()


def test_offline_uses_the_cache_or_says_so(server, folder, tmp_path, monkeypatch):
    """Catches a request in offline mode, and a message that blames the network."""
    hub.push(folder, REPO, check=passes)
    snapshot_download(REPO, endpoint=server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    count = len(server.requests)
    assert hub.diff(hub.pull(REPO, tmp_path / "out"), folder).identical
    assert not (tmp_path / "out" / "config.json").is_symlink()
    with pytest.raises(DSpineHubError, match=r"not complete in the local cache.*`HF_HUB_OFFLINE=0 dspine-hub pull"):
        hub.pull("org/other", tmp_path / "other")
    with pytest.raises(DSpineHubError, match=r"(?i)offline mode forbids.*`HF_HUB_OFFLINE=0 dspine-hub push"):
        hub.push(folder, REPO, check=passes)
    assert len(server.requests) == count


def test_full_disk_is_named_and_leaves_nothing(server, folder, tmp_path, monkeypatch):
    """Catches half a download that fills the disk for good."""
    hub.push(folder, REPO, check=passes)

    def fill(repo_id, local_dir, **keywords):
        (Path(local_dir) / "part").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "snapshot_download", fill)
    with pytest.raises(DSpineHubError, match=r"The disk is full.*`HF_HOME=\S+ dspine-hub pull"):
        hub.pull(REPO, tmp_path / "place" / "out")
    assert list((tmp_path / "place").iterdir()) == []


TOKENS = {
    "unknown": ("hf_unknown1", r"does not accept this token.*`hf auth login`$"),
    "read-only": ("hf_reader", r"may not do that.*--pr`$"),
    "other-owner": ("hf_stranger", r"may not do that.*--pr`$"),
    "none": ("", r"does not accept this token, or there is none: `hf auth login`$"),
}


@pytest.mark.parametrize(("token", "match"), TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("exists", [True, False], ids=["existing", "new"])
def test_wrong_token_is_told_from_a_wrong_name(server, folder, monkeypatch, token, match, exists):
    """Catches `Repository not found` for a login that expired, and a token in the message."""
    if exists:
        hub.push(folder, REPO, check=passes)
        (folder / "config.json").write_text("{}")
    elif "--pr" in match:
        # there is nothing to propose a change to
        match = r"may not create repositories.*`hf auth whoami`$"
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder.parent / "no-token"))
    before = head(server)
    with pytest.raises(DSpineHubError, match=f"(?is){match}") as caught:
        hub.push(seal(folder), REPO, check=passes)
    assert head(server) == before
    assert not token or token not in str(caught.value)


def test_dead_server_is_readable(folder, tmp_path, monkeypatch, sleeps):
    """Catches a traceback when the endpoint is wrong."""
    with HubServer(tmp_path / "server") as gone:
        use(monkeypatch, gone, tmp_path / "cache")
    with pytest.raises(DSpineHubError, match=r"connection failed.*`dspine-hub push"):
        hub.push(folder, REPO, check=passes)


def test_bug_keeps_its_traceback(server, folder, monkeypatch):
    """Catches a table of errors so wide that it hides our own mistakes."""
    monkeypatch.setattr(hub, "_states", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hub.push(folder, REPO, check=passes)


# diff


def test_diff_names_config_tensors_receipts_and_files(server, folder, tmp_path):
    """Catches a difference that is not reported, or a re-sharding reported as new weights."""
    hub.push(folder, REPO, tag="v1", check=passes)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "config.json").write_text(json.dumps({"block_size": 16, "target": {"id": "Qwen/Qwen3-8B"}, "new": 1}))
    (other / "receipts" / "mini.json").write_text(json.dumps({**RECEIPT, "date": "2026-12-24"}))
    tensors = [load_file(path) for path in sorted(other.glob("*.safetensors"))]
    for path in other.glob("model*"):
        path.unlink()
    merged = {**tensors[0], "layers.1.weight": tensors[1]["layers.1.weight"] + 1, "extra": torch.zeros(2, 3)}
    save_file(merged, other / "model.safetensors")
    result = hub.diff(f"{REPO}@v1", other)
    assert result.config == {"block_size": [8, 16], "new": [None, 1]}
    assert result.receipts == {"receipts/mini.json": {"date": [RECEIPT["date"], "2026-12-24"]}}
    assert set(result.tensors) == {"layers.1.weight", "extra"}
    assert result.tensors["extra"][0] is None and result.tensors["extra"][1]["shape"] == [2, 3]
    assert not result.identical and "README.md" not in result.files
    output = CliRunner().invoke(diff_command, [str(folder), str(other)]).output
    assert "config   block_size: 8 -> 16" in output and "tensor   extra: absent -> F32 [2, 3]" in output
    assert CliRunner().invoke(diff_command, [str(folder), f"{REPO}@v1"]).output == "identical\n"


def test_diff_of_damaged_weights_is_readable(folder, tmp_path):
    """Catches a traceback, or a hash of bytes that are not there."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = other / "model-00001-of-00002.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DSpineHubError, match="must be a complete safetensors file"):
        hub.diff(folder, other)


# commands


def test_push_command_prints_data_on_stdout_only(server, folder, monkeypatch, tmp_path):
    """Catches a script that must parse prose, or a token or bar in its input."""
    monkeypatch.setattr("dspine_hub.publish.verify.verify", lambda path, target=None: Report())
    runner = CliRunner()
    dry = runner.invoke(push_command, [str(folder), REPO, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "config.json" in dry.stdout and "# A drafter" in dry.stdout and "Nothing was sent." in dry.stdout
    assert server.requests == []
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


def test_collection_gains_the_repository_once(server, folder):
    """Catches a second push that fails because the repository is in the collection already."""
    server.collections["org/drafters-1"] = ["org/other"]
    for _ in range(2):
        hub.push(folder, REPO, collection="org/drafters-1", check=passes)
    assert server.collections["org/drafters-1"] == ["org/other", REPO]
    with pytest.raises(DSpineHubError, match="404"):
        hub.push(folder, REPO, collection="org/none-2", check=passes)


# a pair that lies on the Hub alone


PAIR = """
import json, sys
from dspine_hub.checkpoints.pairing import check_pair
report = check_pair(sys.argv[1], sys.argv[2])
print(json.dumps(report.as_dict()))
"""


def test_pair_is_checked_from_headers_of_repositories(server, tmp_path):
    """Catches a check that needs the weights: only configs, tokenizer and headers may be fetched."""
    api = HfApi(endpoint=server.url, token=TOKEN)
    for name, folder in (("org/mini-target", MINI / "target"), ("org/mini-drafter", MINI / "drafter")):
        api.create_repo(name)
        operations = [CommitOperationAdd(path.name, str(path)) for path in sorted(folder.iterdir())]
        api.create_commit(name, operations, commit_message="add")
    server.requests.clear()
    env = environment(server, tmp_path / "home")
    command = [sys.executable, "-c", PAIR, "org/mini-drafter", "org/mini-target"]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["ok"]
    # the head's hash needs the weights, which stay where they are
    assert [finding["rule"] for finding in report["findings"]] == ["head-sha256"]
    cached = [path for path in (tmp_path / "home").rglob("*.safetensors") if path.stat().st_size > 1_000_000]
    assert cached == []
