"""Hashes by which services tell whether they speak of the same model and tokens."""

import shutil
from pathlib import Path

from orchestrator.deployment.facts.hub import HuggingFace
from quartet.wire.identity import describe_model, folder_name, model_hash, tokenizer_hash
from tests.models import make_policy, make_tokenizer


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


def test_a_model_is_its_configuration_and_weights_and_nothing_else(policy_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(policy_folder, tmp_path / "copy"))
    assert model_hash(copy) == model_hash(str(policy_folder))
    (copy / "tokenizer_config.json").write_text("{}")
    (copy / "README.md").touch()
    assert model_hash(copy) == model_hash(policy_folder)
    with (copy / "config.json").open("a") as config:
        config.write(" ")
    assert model_hash(copy) != model_hash(policy_folder)
    other = make_policy(tmp_path / "other", kind="llama", tied=False, seed=1)
    assert model_hash(other) != model_hash(policy_folder)


def test_bytes_that_move_from_one_file_to_another_are_another_model(tmp_path: Path) -> None:
    hashes = {
        model_hash(write(tmp_path / "a", config_json=b"{}", a_safetensors=b"12", b_safetensors=b"3")),
        model_hash(write(tmp_path / "b", config_json=b"{}", a_safetensors=b"1", b_safetensors=b"23")),
        model_hash(write(tmp_path / "c", config_json=b"{}", a_safetensors=b"12", c_safetensors=b"3")),
        model_hash(write(tmp_path / "d", config_json=b"{}", a_bin=b"12", b_safetensors=b"3")),
    }
    assert len(hashes) == 4


def test_of_a_large_file_its_size_its_ends_and_every_large_tensor_count(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", config_json=b"{}")
    weights = folder / "model.safetensors"
    size = (256 << 20) + 1

    def hash_after(position: int, content: bytes) -> str:
        with weights.open("r+b") as file:
            file.seek(position)
            file.write(content)
        return model_hash(folder)

    with weights.open("wb") as file:
        file.truncate(size)  # sparse: takes no room on the disk
    hashes = [model_hash(folder)]
    # 2 MiB are more than lie between the beginnings of two pieces.
    places = (0, (128 << 20) + 12_345, size - (2 << 20))
    hashes += [hash_after(place, b"x" * (2 << 20)) for place in places]
    hashes += [hash_after(0, b"y"), hash_after(size - 1, b"y"), hash_after(size, b"\0")]
    assert len(set(hashes)) == 7


def test_a_tokenizer_is_its_vocabulary_in_the_order_of_ids() -> None:
    class Fake:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: index for index, word in sorted(enumerate(self.words), key=lambda entry: entry[1])}

    assert tokenizer_hash(Fake("b", "a")) == tokenizer_hash(Fake("b", "a"))
    assert tokenizer_hash(Fake("b", "a")) != tokenizer_hash(Fake("a", "b"))
    assert tokenizer_hash(Fake("b", "a")) != tokenizer_hash(Fake("b", "a", "c"))
    assert tokenizer_hash(make_tokenizer()) == tokenizer_hash(make_tokenizer())


def test_what_info_says_of_a_model(policy_folder: Path) -> None:
    tokenizer = make_tokenizer()
    info = describe_model(str(policy_folder), tokenizer, vocab_size=64, max_length=128, dtype="float32")
    assert (info.name, info.vocab_size, info.max_length, info.dtype) == (policy_folder.name, 64, 128, "float32")
    assert info.model_hash == model_hash(policy_folder)
    assert info.tokenizer_hash == tokenizer_hash(tokenizer)


def test_models_that_trainings_write_are_told_apart() -> None:
    folders = ("models/reward", "runs/reward/model", "runs/sft/model/", "/model")
    assert [*map(folder_name, folders)] == ["reward", "reward/model", "sft/model", "model"]


def test_a_model_of_a_hub_has_its_name_and_not_that_of_its_commit() -> None:
    commit = "7ae557604adf67be50417f59c2c2f167def9a775"
    hub = HuggingFace()
    folders = [str(hub.folder(name, commit, "model")) for name in ("Qwen/Qwen2.5-0.5B", "gpt2")]
    assert [*map(folder_name, folders)] == ["Qwen/Qwen2.5-0.5B", "gpt2"]
    assert folder_name(f"mine/snapshots/{commit}") == commit
