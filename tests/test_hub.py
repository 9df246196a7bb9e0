"""Checkpoints of the Hub: the real client against a small server, with what goes wrong on the way."""

import itertools
import json
import shutil
import signal
import socket
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import WeakFileLock

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.pipeline.hub import fetch
from kandinsky5_nabla.pipeline.hub_files import PARTS, Part, needed_files

SHARD = "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
VAE = "vae/diffusion_pytorch_model.safetensors"
numbers = itertools.count()


@pytest.fixture(scope="module")
def hub_and_client(server, tmp_path_factory):
    with server.hub_and_client(tmp_path_factory.mktemp("home")) as pair:
        yield pair


@pytest.fixture
def hub(hub_and_client):
    hub = hub_and_client[0]
    hub.requests.clear()
    hub.hold_after = None
    return hub


@pytest.fixture
def client(hub_and_client):
    return hub_and_client[1]


@pytest.fixture(scope="module")
def demo(server):
    """All files of a checkpoint, with many that nobody needs."""
    return server.sharded_demo()


@pytest.fixture(scope="module")
def needed(server, demo):
    """Those that are needed."""
    return {name: content for name, content in demo.items() if name not in server.UNNEEDED}


@pytest.fixture
def repo_id(hub, demo):
    """A repository of its own for each test."""
    repo_id = f"someone/checkpoint-{next(numbers)}"
    hub.add(repo_id, demo)
    return repo_id


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def filled(hub_and_client, demo, tmp_path_factory):
    """A cache with everything, its repository and commit; not to be changed."""
    hub, client = hub_and_client
    cache = tmp_path_factory.mktemp("filled")
    commit = hub.add("someone/filled", demo)
    client.call("fetch", "someone/filled", cache_dir=cache)
    return cache, "someone/filled", commit


def contents(answer):
    folder = Path(answer["folder"])
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leavings(cache):
    return [path for path in cache.rglob("*") if path.name.endswith((".incomplete", ".tmp"))]


def test_what_is_needed_is_fetched_and_nothing_else_and_a_pipeline_loads_from_it(hub, client, repo_id, needed, cache):
    answer = client.call("fetch", repo_id, cache_dir=cache)
    assert contents(answer) == needed
    assert sorted(answer["files"]) == sorted(needed)
    assert sorted(name for name in hub.bodies(repo_id) if not name.startswith("api/")) == sorted(needed)
    assert answer["commit"] == hub.revisions[repo_id, "main"] == Path(answer["folder"]).name
    pipe = Kandinsky5NablaPipeline.from_pretrained(answer["folder"], preset="demo")
    assert pipe.transformer.config.model_dim > 0


def test_a_second_fetch_asks_for_the_commit_alone(hub, client, repo_id, cache):
    first = client.call("fetch", repo_id, cache_dir=cache)
    hub.requests.clear()
    second = client.call("fetch", repo_id, cache_dir=cache)
    assert second["folder"] == first["folder"]
    assert hub.requests == [("GET", repo_id, "api/")]


@pytest.mark.parametrize("percent", [30, 60, 90])
def test_after_a_kill_the_next_run_ends_identical_and_fetches_no_finished_file_again(
    hub, client, repo_id, needed, cache, percent
):
    hub.hold(sum(map(len, needed.values())) * percent // 100)
    process = client.start(repo_id, cache_dir=str(cache))
    assert hub.held.wait(120)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    hub.hold_after = None
    finished = {name for path in cache.glob("models--*/snapshots/*") for name in contents({"folder": path})}
    assert any(name.endswith(".safetensors") for name in finished), (finished, hub.sent, hub.requests)
    assert finished < set(needed)
    assert leavings(cache) != []

    hub.requests.clear()
    answer = client.call("fetch", repo_id, cache_dir=cache)
    assert contents(answer) == needed
    assert set(hub.bodies(repo_id)) - {"api/", "api/tree"} == set(needed) - finished
    assert leavings(cache) == []


def test_a_broken_connection_costs_that_file_alone_and_not_the_run(hub, client, repo_id, needed, cache):
    hub.broken[repo_id, SHARD] = 100_000
    answer = client.call("fetch", repo_id, cache_dir=cache)
    assert contents(answer) == needed
    assert sorted(hub.bodies(repo_id)) == sorted(["api/", "api/tree", *needed, SHARD])


def test_a_file_that_arrives_shorter_than_recorded_is_named_removed_and_fetched_again(
    hub, client, repo_id, needed, cache
):
    hub.served[repo_id, SHARD] = needed[SHARD][:-1000]
    answer = client.call("fetch", repo_id, cache_dir=cache)
    assert answer["raised"] == "CheckpointError"
    assert repo_id in answer["text"]
    assert f"{SHARD} has {len(needed[SHARD]) - 1000} bytes, the Hub records {len(needed[SHARD])}" in answer["text"]
    del hub.served[repo_id, SHARD]
    hub.requests.clear()
    assert contents(client.call("fetch", repo_id, cache_dir=cache)) == needed
    assert [name for name in hub.bodies(repo_id) if not name.startswith("api/")] == [SHARD]


def test_a_cached_file_of_a_wrong_length_is_fetched_again_with_a_warning(hub, client, repo_id, needed, cache):
    folder = Path(client.call("fetch", repo_id, cache_dir=cache)["folder"])
    for name in (SHARD, "model_index.json"):
        (folder / name).resolve().write_bytes(needed[name][:-10])
    hub.requests.clear()
    answer = client.call("fetch", repo_id, cache_dir=cache)
    assert contents(answer) == needed
    assert f"{SHARD} of {repo_id}" in answer["errors"]
    bodies = [name for name in hub.bodies(repo_id) if not name.startswith("api/")]
    assert sorted(bodies) == ["model_index.json", SHARD]


def test_a_shard_that_was_cut_short_before_it_was_recorded_is_named(hub, client, repo_id, demo, cache):
    hub.add(repo_id, {**demo, SHARD: demo[SHARD][:-1000]})
    answer = client.call("fetch", repo_id, cache_dir=cache)
    assert answer["raised"] == "CheckpointError"
    assert repo_id in answer["text"]
    assert SHARD in answer["text"]
    assert "--verify" in answer["text"]


@pytest.mark.parametrize("lacking", [SHARD, VAE, "transformer/config.json", "model_index.json"])
def test_what_the_repository_lacks_is_named_before_any_weights_are_fetched(hub, client, repo_id, demo, cache, lacking):
    hub.add(repo_id, {name: content for name, content in demo.items() if name != lacking})
    answer = client.call("fetch", repo_id, cache_dir=cache)
    assert answer["raised"] == "RepositoryError"
    assert repo_id in answer["text"]
    assert lacking in answer["text"]
    assert not any(name.endswith(".safetensors") for name in hub.bodies(repo_id))


def test_a_part_that_model_index_names_with_null_is_not_fetched(hub, client, repo_id, demo, needed, cache):
    index = json.loads(demo["model_index.json"])
    index["text_encoder_2"] = index["scheduler"] = [None, None]
    files = {**demo, "model_index.json": json.dumps(index).encode()}
    del files["scheduler/scheduler_config.json"]
    hub.add(repo_id, files)
    answer = client.call("fetch", repo_id, cache_dir=cache)
    assert "text_encoder_2/model.safetensors" not in answer["files"]
    assert len(answer["files"]) == len(needed) - 3  # config and weights of the encoder, the scheduler's config


def test_a_file_that_is_listed_and_not_there_is_named(hub, client, repo_id, cache):
    hub.absent.add((repo_id, VAE))
    answer = client.call("fetch", repo_id, cache_dir=cache)
    assert answer["raised"] == "RepositoryError"
    assert f"{VAE} of {repo_id}" in answer["text"]


@pytest.mark.parametrize(
    ("status", "code", "raised", "words"),
    [
        (401, None, "AccessError", ["HF_TOKEN", "401"]),
        (401, "RepoNotFound", "AccessError", ["HF_TOKEN", "check the name"]),
        (403, "GatedRepo", "AccessError", ["HF_TOKEN", "gated"]),
        (403, None, "AccessError", ["HF_TOKEN", "403"]),
        (404, "RepoNotFound", "RepositoryError", ["check the name"]),
        (500, None, "NetworkError", ["500", "try again"]),
        (None, None, "NetworkError", ["check the network", "--offline", "HF_HUB_OFFLINE"]),
    ],
)
def test_an_answer_that_is_none_says_what_to_do(hub, client, repo_id, cache, status, code, raised, words):
    hub.refused[repo_id] = status, code
    answer = client.call("fetch", repo_id, cache_dir=cache)
    assert answer["raised"] == raised
    assert [word for word in [repo_id, *words] if word not in answer["text"]] == []
    assert not cache.exists()


def test_an_unknown_revision_is_named(client, repo_id, cache):
    answer = client.call("fetch", repo_id, revision="v9", cache_dir=cache)
    assert answer["raised"] == "RepositoryError"
    assert repo_id in answer["text"]
    assert "'v9'" in answer["text"]


def test_an_id_that_is_none_is_refused_before_anything_is_asked(hub, client, cache):
    answer = client.call("fetch", "a/b/c", cache_dir=cache)
    assert (answer["raised"], hub.requests) == ("ArgumentError", [])


def test_one_file_is_fetched_alone_and_found_again_offline(hub, client, cache):
    repo_id, name = "someone/original", "model/kandinsky5lite_t2v_sft_10s.safetensors"
    hub.add(repo_id, {name: b"\x02" + bytes(7) + b"{}", "other.safetensors": b"nobody needs this"})
    answer = client.call("fetch_file", repo_id, name, cache_dir=cache)
    assert contents(answer).keys() == {name}
    assert client.call("fetch_file", repo_id, name, cache_dir=cache, offline=True)["folder"] == answer["folder"]
    for wrong in ({}, {"offline": True}):
        answer = client.call("fetch_file", repo_id, "model/typo.safetensors", cache_dir=cache, **wrong)
        assert answer["raised"] == "RepositoryError"
        assert repo_id in answer["text"]
        assert "model/typo.safetensors" in answer["text"]


def test_two_repositories_in_one_cache_keep_their_own_parts(hub, client, repo_id, demo, needed, cache):
    other = {**needed, SHARD: demo[SHARD][:-4] + b"else", "vae/config.json": needed["vae/config.json"] + b"\n"}
    hub.add("someone/other", other)
    hub.add("someone-else/other", needed)
    for offline in (False, True):
        first = client.call("fetch", repo_id, cache_dir=cache, offline=offline)
        second = client.call("fetch", "someone/other", cache_dir=cache, offline=offline)
        third = client.call("fetch", "someone-else/other", cache_dir=cache, offline=offline)
        assert (contents(first), contents(second), contents(third)) == (needed, other, needed)


def test_an_update_fetches_what_changed_and_takes_effect_offline_when_it_is_complete(hub, client, repo_id, demo, cache):
    old = client.call("fetch", repo_id, cache_dir=cache)
    changed = {**demo, SHARD: demo[SHARD][:-4] + b"else"}
    new_commit = hub.add(repo_id, changed)
    hub.absent.add((repo_id, SHARD))
    assert client.call("fetch", repo_id, cache_dir=cache)["raised"] == "RepositoryError"
    assert client.call("fetch", repo_id, cache_dir=cache, offline=True)["commit"] == old["commit"]

    hub.absent.clear()
    hub.requests.clear()
    assert client.call("fetch", repo_id, cache_dir=cache)["commit"] == new_commit
    assert [name for name in hub.bodies(repo_id) if not name.startswith("api/")] == [SHARD]
    assert client.call("fetch", repo_id, cache_dir=cache, offline=True)["commit"] == new_commit
    pinned = client.call("fetch", repo_id, revision=old["commit"], cache_dir=cache, offline=True)
    assert contents(pinned)[SHARD] == demo[SHARD]


def test_orphans_are_removed_unless_another_process_is_writing_them(client, repo_id, cache):
    storage = cache / f"models--{repo_id.replace('/', '--')}"
    locks = cache / ".locks" / storage.name
    for folder in (storage / "blobs", locks):
        folder.mkdir(parents=True)
    for name in ("aa.11111111.incomplete", "bb.22222222.incomplete", "bb.incomplete"):
        (storage / "blobs" / name).write_bytes(b"half")
    with WeakFileLock(locks / "aa.lock"):
        client.call("fetch", repo_id, cache_dir=cache)
        assert [path.name for path in leavings(cache)] == ["aa.11111111.incomplete"]
    client.call("fetch", repo_id, cache_dir=cache)
    assert leavings(cache) == []


def test_offline_with_everything_cached_no_socket_is_opened(hub, client, filled, monkeypatch):
    cache, repo_id, commit = filled
    online = client.call("fetch", repo_id, cache_dir=cache)
    assert hub.requests != []
    hub.requests.clear()
    answer = client.call("fetch", repo_id, cache_dir=cache, offline=True)
    assert (answer["folder"], answer["files"]) == (online["folder"], online["files"])
    assert (answer["sockets"], hub.requests) == ([], [])

    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # what the variable of that name does
    assert fetch(repo_id, cache_dir=cache).commit == commit
    assert fetch(repo_id, cache_dir=cache, revision=commit).commit == commit


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "filled by an older client"])
def test_offline_a_missing_file_is_named_with_its_repository_whichever_it_is(filled, needed, tmp_path, recorded):
    cache, repo_id, commit = filled
    copy = shutil.copytree(cache, tmp_path / "copy", symlinks=True)
    if not recorded:
        shutil.rmtree(copy / "models--someone--filled" / "trees")
        needed = [name for name in needed if not name.startswith("tokenizer")]  # any of them may be optional there
        needed.remove(INDEX)  # then the single file is missed, which is as good
    folder = fetch(repo_id, cache_dir=copy, offline=True).folder
    for name in needed:
        (folder / name).rename(tmp_path / "away")
        with pytest.raises(FileNotFoundError, match=rf"{name} of {repo_id} at commit {commit}.*download.py {repo_id}"):
            fetch(repo_id, cache_dir=copy, offline=True)
        (tmp_path / "away").rename(folder / name)
    assert fetch(repo_id, cache_dir=copy, offline=True).folder == folder


def test_offline_a_cut_file_is_named_with_its_repository(filled, tmp_path):
    cache, repo_id, _ = filled
    copy = shutil.copytree(cache, tmp_path / "copy", symlinks=True)
    shard = (fetch(repo_id, cache_dir=copy, offline=True).folder / SHARD).resolve()
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ValueError, match=rf"{repo_id}.*{SHARD} has .* bytes.*download.py {repo_id}"):
        fetch(repo_id, cache_dir=copy, offline=True)


def test_offline_a_repository_or_revision_that_was_never_fetched_is_named(filled):
    cache, repo_id, commit = filled
    with pytest.raises(FileNotFoundError, match=r"no/such is not in the cache .*download.py no/such`"):
        fetch("no/such", cache_dir=cache, offline=True)
    with pytest.raises(FileNotFoundError, match=rf"revision v9 of {repo_id} .*{commit}.*--revision v9"):
        fetch(repo_id, cache_dir=cache, revision="v9", offline=True)


def test_hashes_are_not_said_to_be_verified_offline(filled):
    cache, repo_id, _ = filled
    with pytest.raises(ValueError, match=f"{repo_id} cannot be verified offline"):
        fetch(repo_id, cache_dir=cache, offline=True, verify=True)


def test_the_parts_are_those_of_a_checkpoint_in_the_diffusers_layout():
    folder = load_preset("demo").local_folder
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    unneeded = {"README.md", "text_encoder/generation_config.json"}
    assert sorted(needed_files(folder, names, PARTS)) == sorted(set(names) - unneeded)


def test_a_part_may_be_a_repository_of_its_own(tmp_path):
    encoder = {"": Part(("*.json", "*.txt"), "model.safetensors")}
    index = "model.safetensors.index.json"
    names = ["config.json", "merges.txt", index, "model-1.safetensors", "model-2.safetensors", "x/y.json", "a.bin"]
    small = ["config.json", "merges.txt", index]
    assert needed_files(tmp_path, names, encoder) == small
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": "model-2.safetensors", "b": "model-3.safetensors"}}))
    assert needed_files(tmp_path, names, encoder) == [*small, "model-2.safetensors", "model-3.safetensors"]
    assert needed_files(tmp_path, [*names, "model.safetensors"], encoder) == [*small, "model.safetensors"]


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json"):
        needed_files(tmp_path, ["model.safetensors.index.json"], {"": Part((), "model.safetensors")})
