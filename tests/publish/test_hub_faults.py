"""Faults of network, server and process: passing ones are survived, lasting ones change nothing."""

import signal
import subprocess
import sys

import pytest
from helpers.hub import PUSH, REPO, TOKEN, assert_holds, environment, head, passes, seal, use, write_shards
from helpers.loopback_hub import HubServer
from helpers.paths import ROOT
from huggingface_hub import HfApi, constants

import dspine_hub
from dspine_hub.errors import DSpineHubError

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
    dspine_hub.push(folder, REPO, tag="v1", check=passes)
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
    dspine_hub.push(seal(folder), REPO, check=passes)
    before = head(server)
    write_shards(folder, 2, seed=3)
    fault = server.fault(method, pattern, times=100, message=f"no, Bearer {TOKEN}", **fields)
    with pytest.raises(DSpineHubError, match=f"(?is){match}") as caught:
        dspine_hub.push(seal(folder), REPO, check=passes)
    assert head(server) == before and TOKEN not in str(caught.value)
    fault.times = 0
    dspine_hub.push(folder, REPO, check=passes)
    assert_holds(server, folder)


def test_refused_tag_is_made_by_the_next_run(server, folder, sleeps):
    """Catches a second commit, or a release that stays without its tag."""
    fault = server.fault("POST", "/tag/", status=503, times=100)
    with pytest.raises(DSpineHubError, match=r"unavailable.*`dspine-hub push \S+ \S+ --tag v1`$"):
        dspine_hub.push(folder, REPO, tag="v1", check=passes)
    assert_holds(server, folder)
    made, fault.times = head(server), 0
    assert not dspine_hub.push(folder, REPO, tag="v1", check=passes).committed
    assert server.repositories[REPO].tags == {"v1": made}


def test_lost_answer_to_a_commit_is_no_second_commit(server, folder):
    """Catches a blind retry: the commit was made, only its answer was lost."""
    server.fault("POST", "/commit/", mute=True)
    with pytest.raises(DSpineHubError, match=r"connection failed.*`dspine-hub push \S+ \S+ --tag v1`$"):
        dspine_hub.push(folder, REPO, tag="v1", check=passes)
    assert_holds(server, folder)
    made = head(server)
    assert not dspine_hub.push(folder, REPO, tag="v1", check=passes).committed
    assert server.repositories[REPO].tags == {"v1": made}
    assert len(server.seen("POST", "/commit/")) == 1


def test_stale_parent_is_refused(server, folder, monkeypatch):
    """Catches a push that overwrites what someone committed while it uploaded."""
    dspine_hub.push(folder, REPO, check=passes)
    upload = HfApi.preupload_lfs_files

    def upload_while_main_moves(api, *arguments, **keywords):
        upload(api, *arguments, **keywords)
        repository = server.repositories[REPO]
        repository.branches["main"] = repository.commit(repository.head, repository.files(), "theirs")

    monkeypatch.setattr(HfApi, "preupload_lfs_files", upload_while_main_moves)
    (folder / "config.json").write_text("{}")
    with pytest.raises(DSpineHubError, match="(?i)someone else committed"):
        dspine_hub.push(seal(folder), REPO, tag="v2", check=passes)
    repository = server.repositories[REPO]
    assert repository.commits[repository.head].title == "theirs" and repository.tags == {}


def test_killed_before_the_commit_changes_nothing(server, folder, tmp_path):
    """Catches a release that is half there, and blobs uploaded twice."""
    dspine_hub.push(folder, REPO, check=passes)
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
    dspine_hub.push(folder, REPO, tag="v1", check=passes)
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
    dspine_hub.push(folder, REPO, check=passes)
    assert_holds(server, folder)


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
        dspine_hub.push(folder, REPO, check=passes)
        (folder / "config.json").write_text("{}")
    elif "--pr" in match:
        # there is nothing to propose a change to
        match = r"may not create repositories.*`hf auth whoami`$"
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder.parent / "no-token"))
    before = head(server)
    with pytest.raises(DSpineHubError, match=f"(?is){match}") as caught:
        dspine_hub.push(seal(folder), REPO, check=passes)
    assert head(server) == before
    assert not token or token not in str(caught.value)


def test_dead_server_is_readable(folder, tmp_path, monkeypatch, sleeps):
    """Catches a traceback when the endpoint is wrong."""
    with HubServer(tmp_path / "server") as gone:
        use(monkeypatch, gone, tmp_path / "cache")
    with pytest.raises(DSpineHubError, match=r"connection failed.*`dspine-hub push"):
        dspine_hub.push(folder, REPO, check=passes)


def test_bug_keeps_its_traceback(server, folder, monkeypatch):
    """Catches a table of errors so wide that it hides our own mistakes."""
    monkeypatch.setattr("dspine_hub.publish.push.make_plan", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dspine_hub.push(folder, REPO, check=passes)
