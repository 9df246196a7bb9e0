"""The command line that fetches checkpoints ahead of time."""

from pathlib import Path

import huggingface_hub
import pytest

from kandinsky5_nabla.configs import load_preset
from kandinsky5_nabla.scripts.download import main

PRESET = load_preset("lite-t2v-10s-sft")
SHARD = "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"


@pytest.fixture(scope="module")
def hub_and_client(server, tmp_path_factory):
    with server.hub_and_client(tmp_path_factory.mktemp("home")) as pair:
        hub, _ = pair
        hub.add(PRESET.model, server.sharded_demo())
        hub.add("someone/else", server.sharded_demo(), revision="v1")
        hub.add("someone/demo", server.sharded_demo())
        yield pair


@pytest.fixture
def hub(hub_and_client):
    return hub_and_client[0]


@pytest.fixture
def download(hub_and_client, tmp_path):
    """Runs the command line in a process that reaches the server, with a cache of its own."""

    def run(*argv):
        return hub_and_client[1].call("download", *argv, "--cache-dir", str(tmp_path / "cache"))

    return run


def test_presets_and_hub_ids_are_fetched_and_each_has_its_line(server, hub, download):
    answer = download("demo", PRESET.name, PRESET.model, "someone/else", "--revision", "main")
    assert answer["code"] == 1  # someone/else has only v1
    assert "someone/else" in answer["errors"]
    assert "'main'" in answer["errors"]
    of_demo, of_preset = answer["said"].splitlines()
    assert of_demo == "demo: comes with the package, nothing to fetch"
    assert of_preset.startswith(f"{PRESET.model}: ")
    count = len(server.sharded_demo()) - len(server.UNNEEDED)
    assert f"commit {hub.revisions[PRESET.model, 'main']}, {count} files, 0.01 GB" in of_preset
    assert f"{PRESET.model}: {SHARD}, 0.00 GB (2 of 6, after " in answer["errors"]

    answer = download("someone/else", "--revision", "v1")
    assert (answer["code"], answer["errors"].count("someone/else")) == (0, 6)


def test_offline_checks_what_the_cache_has(hub, download):
    answer = download(PRESET.name, "--offline")
    assert (answer["code"], answer["said"]) == (1, "")
    assert PRESET.model in answer["errors"]
    assert f"scripts/download.py {PRESET.model}" in answer["errors"]
    online = download(PRESET.name)
    hub.requests.clear()
    answer = download(PRESET.name, "--offline")
    assert (answer["code"], answer["said"], answer["errors"]) == (0, online["said"], "")
    assert (answer["sockets"], hub.requests) == ([], [])


def test_verify_names_what_differs_and_the_next_run_mends_it(download):
    answer = download(PRESET.name, "--verify")
    assert answer["code"] == 0
    assert answer["said"].endswith("each as the Hub records it\n")
    folder = Path(answer["said"].split(": ")[1].split(", ")[0])
    for name in (SHARD, "vae/config.json"):  # the hash of an LFS file, and that of git
        content = (folder / name).read_bytes()
        (folder / name).resolve().write_bytes(content[:-3] + b"xyz")
    assert download(PRESET.name)["code"] == 0  # sizes are as recorded
    answer = download(PRESET.name, "--verify")
    assert (answer["code"], answer["said"], answer["errors"].count("\n")) == (1, "", 1)
    assert f"{SHARD} has the sha256 " in answer["errors"]
    assert "vae/config.json has the git hash " in answer["errors"]
    assert (answer["errors"].count(" has the "), PRESET.model in answer["errors"]) == (2, True)
    answer = download(PRESET.name, "--verify")
    assert (answer["code"], answer["errors"].count(SHARD)) == (0, 1)


@pytest.mark.parametrize("name", [SHARD, INDEX, "model_index.json"])
def test_verify_finds_damage_that_keeps_a_file_from_being_read(download, name):
    folder = Path(download(PRESET.name)["said"].split(": ")[1].split(", ")[0])
    (folder / name).resolve().write_bytes(bytes((folder / name).stat().st_size))
    answer = download(PRESET.name)
    assert answer["code"] == 1
    assert f"scripts/download.py {PRESET.model} --verify" in answer["errors"]
    answer = download(PRESET.name, "--verify")
    assert answer["code"] == 1
    assert f"{name} has the " in answer["errors"]
    assert download(PRESET.name, "--verify")["code"] == 0


def test_verify_finds_what_arrives_damaged(hub, download):
    content = hub.commits[PRESET.model, hub.revisions[PRESET.model, "main"]][SHARD]
    hub.served[PRESET.model, SHARD] = content[:-3] + b"xyz"
    answer = download(PRESET.name, "--verify")
    del hub.served[PRESET.model, SHARD]
    assert answer["code"] == 1
    assert f"{SHARD} has the sha256 " in answer["errors"]
    assert download(PRESET.name, "--verify")["code"] == 0


def test_a_token_is_named_where_one_is_needed(hub, download):
    hub.refused["someone/private"] = 401, "RepoNotFound"
    answer = download("someone/private")
    assert answer["code"] == 1
    assert answer["errors"].count("\n") == 1
    assert "someone/private" in answer["errors"]
    assert "HF_TOKEN" in answer["errors"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["lite-t2v-10s-stf"], ["lite-t2v-10s-stf", "did you mean 'lite-t2v-10s-sft'"]),
        (["lite-t2v-10s-stf", "a/b/c", "demmo"], ["lite-t2v-10s-stf", "a/b/c", "demmo"]),
        (["demo", "--verify", "--offline"], ["--verify", "--offline"]),
        ([], ["NAME"]),
        (["demo", "."], ["is a folder, nothing to fetch"]),
        (["demo", "--cache-dir", __file__], ["--cache-dir", "is a file; name a folder"]),
        (["demo", "--revison", "v1"], ["--revison"]),
    ],
)
def test_bad_input_is_refused_before_the_hub_is_asked(argv, words, capsys):
    assert main(argv) == 2
    said = capsys.readouterr()
    assert [word for word in words if word not in said.err] == []
    assert all(line.startswith("error: ") for line in said.err.splitlines())


def test_verify_is_refused_where_the_variable_says_offline(capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # what the variable of that name does
    assert main(["someone/else", "--verify"]) == 2
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err


def test_a_failure_in_running_has_exit_code_1_and_a_traceback_on_demand(tmp_path, capsys):
    for debug in ([], ["--debug"]):
        assert main(["no/such", "--offline", "--cache-dir", str(tmp_path), *debug]) == 1
        assert ("Traceback" in capsys.readouterr().err) == bool(debug)


def test_with_saved_embeddings_no_text_encoder_is_fetched(hub_and_client, hub, tmp_path):
    quick = ["--height", "64", "--width", "64", "--num-frames", "1", "--steps", "1", "--seed", "1", "--device", "cpu"]
    quick += ["--config", "demo", "--attention", "NABLA_REFERENCE", "--prompt", "a red square"]
    embeds, cache = str(tmp_path / "texts.safetensors"), str(tmp_path / "cache")
    client = hub_and_client[1]
    first = client.call("generate", *quick, "--output", str(tmp_path / "a.mp4"), "--save-embeds", embeds)
    assert first["code"] == 0, first["errors"]
    hub.requests.clear()
    again = [*quick, "--model", "someone/demo", "--cache-dir", cache, "--embeds", embeds]
    second = client.call("generate", *again, "--output", str(tmp_path / "b.mp4"))
    assert second["code"] == 0, second["errors"]
    folders = {name.partition("/")[0] for name in hub.bodies("someone/demo")}
    assert folders - {"api"} == {"model_index.json", "transformer", "vae", "scheduler"}
    third = client.call("generate", *again, "--offline", "--output", str(tmp_path / "c.mp4"))
    assert (third["code"], third["sockets"]) == (0, []), third["errors"]
    assert (tmp_path / "b.mp4").read_bytes() == (tmp_path / "c.mp4").read_bytes()
