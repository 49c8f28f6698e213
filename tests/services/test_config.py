"""The configuration: what it accepts, and what it says about the rest, by key."""

from pathlib import Path
from typing import Any

import pytest

from services.config import (
    RunConfig,
    build_config,
    default_cache_dir,
    find_config,
    load_config,
    load_run_dir,
    read_run_config,
    visible_gpus,
    write_run_config,
)
from services.config_checks import ConfigError

MODEL = {"name": "m", "source": "./model"}
BASE = Path("/base")


def build(raw: dict[str, Any]) -> Any:
    return build_config({"models": [MODEL], **raw}, BASE)


def problems(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(raw)
    return caught.value.problems


def drafting(**speculation: Any) -> dict[str, Any]:
    return {"models": [{**MODEL, "rank": {"speculation": {"proposer": "n_gram"} | speculation}}]}


def test_the_default_file_is_valid() -> None:
    config = load_config(find_config(None))
    assert [model.name for model in config.models] == ["all-minilm-l6-v2", "smollm2-135m-instruct"]
    assert sum(model.rank.memory_fraction for model in config.models) <= 1  # both fit on one GPU
    assert (config.gateway.host, config.gateway.port) == ("127.0.0.1", 8080)


def test_sections_are_defaults_for_every_model() -> None:
    config = build(
        {
            "rank": {"num_threads": 3, "dtype": "float16"},
            "scheduler": {"bulk_share": 0.5},
            "models": [
                MODEL,
                {"name": "n", "source": "hf:a/b", "memory_fraction": 0.25, "rank": {"num_threads": 1}},
            ],
        }
    )
    first, second = config.models
    assert (first.rank.num_threads, first.rank.dtype, first.rank.memory_fraction) == (3, "float16", 0.9)
    assert (second.rank.num_threads, second.rank.dtype, second.rank.memory_fraction) == (1, "float16", 0.25)
    assert first.scheduler.bulk_share == second.scheduler.bulk_share == 0.5


def test_paths_become_absolute() -> None:
    config = build({"run_dir": "run", "cache_dir": "cache"})
    assert (config.run_dir, config.cache_dir) == ("/base/run", "/base/cache")
    assert config.models[0].source == "/base/model"
    (model,) = build(drafting(proposer="draft_model", model="draft", draft_vocab=9, draft_vocab_ids="ids.json")).models
    assert model.rank.speculation.model == "/base/draft"
    assert model.rank.speculation.draft_vocab_ids == "/base/ids.json"
    (model,) = build(drafting(proposer="mtp", model="./hf:a")).models
    assert model.rank.speculation.model == "/base/hf:a"
    assert build_config({"models": [MODEL]}, BASE, Path("/other")).run_dir == "/other"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"models": [{**MODEL, "replicas": 0}]}, "models[0].replicas: must be 1..64, got 0"),
        ({"models": [{**MODEL, "replicas": "2"}]}, "models[0].replicas: expected a whole number, got '2'"),
        ({"models": [{**MODEL, "replicas": True}]}, "models[0].replicas: expected a whole number, got True"),
        ({"models": [{"name": "m"}]}, "models[0].source: missing"),
        ({"models": [MODEL, {"source": "./x"}]}, "models[1].name: missing"),
        ({"models": []}, "models: none given"),
        ({"models": {}}, "models: expected a list, got {}"),
        ({"models": ["m"]}, "models[0]: expected a table, got 'm'"),
        ({"models": [{**MODEL, "replica": 2}]}, "models[0].replica: unknown key; did you mean 'replicas'?"),
        ({"gatway": {}}, "gatway: unknown key; did you mean 'gateway'?"),
        ({"gateway": {"prot": 1}}, "gateway.prot: unknown key; did you mean 'port'?"),
        ({"gateway": {"zzzzzz": 1}}, "gateway.zzzzzz: unknown key; known are host, port"),
        ({"gateway": {"port": 70000}}, "gateway.port: must be 1..65535, got 70000"),
        ({"gateway": {"port": 80.5}}, "gateway.port: expected a whole number, got 80.5"),
        ({"gateway": 3}, "gateway: expected a table, got 3"),
        ({"gateway": {"num_gateways": 0}}, "gateway.num_gateways: must be 1..64, got 0"),
        ({"gateway": {"timeout_ms": -5}}, "gateway.timeout_ms: must be 1..86400000, got -5"),
        (
            {"scheduler": {"hello_deadline_ms": 500}},
            "scheduler.hello_deadline_ms: must be 2000..86400000, got 500",
        ),
        (
            {"scheduler": {"gateway_heartbeat_ms": 500}},
            "scheduler.gateway_heartbeat_ms: must be 4000..86400000, got 500",
        ),
        ({"scheduler": {"canary_interval_ms": 60_000}}, "scheduler.canary_interval_ms: must be 100..10000, got 60000"),
        ({"scheduler": {"bulk_share": 1.5}}, "scheduler.bulk_share: must be 0.0..1.0, got 1.5"),
        ({"scheduler": {"bulk_share": float("nan")}}, "scheduler.bulk_share: must be 0.0..1.0, got nan"),
        (
            {"rank": {"dtype": "int3"}},
            "rank.dtype: expected 'auto' or 'float32' or 'float16' or 'bfloat16', got 'int3'",
        ),
        ({"rank": {"kv_cache_bytes": -1}}, "rank.kv_cache_bytes: must be 1..1125899906842624, got -1"),
        ({"models": [{**MODEL, "rank": {"num_threads": 0}}]}, "models[0].rank.num_threads: must be 1..1024, got 0"),
        ({"models": [{**MODEL, "memory_fraction": 0.0}]}, "models[0].memory_fraction: must be 0.01..1.0, got 0.0"),
        ({"models": [{**MODEL, "tensor_parallel_size": 0}]}, "models[0].tensor_parallel_size: must be 1..64, got 0"),
        ({"rank": {"device": "gpu"}}, "models[0].rank.device: must be auto, cpu or cuda, got 'gpu'"),
        ({"models": [{**MODEL, "name": "a b"}]}, "models[0].name: 'a b' must be"),
        ({"models": [{**MODEL, "name": "gateways"}]}, "models[0].name: 'gateways' is what the commands call"),
        ({"models": [MODEL, MODEL]}, "models[1].name: 'm' is too like models[0].name ('m')"),
        ({"models": [{**MODEL, "name": "a/b"}, {**MODEL, "name": "a_b"}]}, "models[1].name: 'a_b' is too like"),
        ({"models": [{**MODEL, "source": "ftp:x"}]}, "models[0].source: 'ftp:x' has the unknown scheme 'ftp'"),
        ({"models": [{**MODEL, "source": "hf:x"}]}, "models[0].source: 'hf:x' is not hf:owner/name"),
        ({"models": [{**MODEL, "source": "pypi:x>=1"}]}, "models[0].source: 'pypi:x>=1' is not pypi:name==version"),
        ({"models": [{**MODEL, "source": "pypi:x==1"}]}, "models[0].source: 'pypi:x==1' has no known checksum"),
        ({"scheduler": {"listen": "ipc:///x"}}, "models[0].scheduler.listen: must be tcp://address:port, got"),
        (
            {"models": [{**MODEL, "replicas": 2}], "scheduler": {"listen": "tcp://*:1"}},
            "models[0].scheduler.listen: one endpoint cannot serve 2 replicas",
        ),
        (
            {"models": [MODEL, {**MODEL, "name": "n"}], "scheduler": {"listen": "tcp://*:1"}},
            "models[1].scheduler.listen: models[0] listens there",
        ),
        ({"run_dir": "~nobody-here/x"}, "run_dir: '~nobody-here/x': nothing is known of a home directory ~nobody-here"),
        ({"cache_dir": "~nobody-here"}, "cache_dir: '~nobody-here': nothing is known of"),
        ({"cache_dir": "a\0b"}, "cache_dir: 'a\\x00b' holds a zero character"),
        ({"models": [{**MODEL, "source": "~nobody-here"}]}, "models[0].source: '~nobody-here': nothing is known of"),
        (
            {"models": [{**MODEL, "source": "random:tiny?tokenizer=~nobody-here/t"}]},
            "models[0].source: '~nobody-here/t': nothing is known of",
        ),
        ({"models": [{**MODEL, "source": "random:tiny?tokenizer=%00"}]}, "models[0].source: '\\x00' holds a zero"),
        (
            {"models": [{**MODEL, "source": "random:tiny?seed=1&seed=2"}]},
            "models[0].source: 'random:tiny?seed=1&seed=2'",
        ),
        (drafting(proposer="mtp", model="~nobody-here"), "models[0].rank.speculation.model: '~nobody-here': nothing"),
        (
            drafting(proposer="mtp", model="x", draft_vocab=1, draft_vocab_ids="~nobody-here"),
            "models[0].rank.speculation.draft_vocab_ids: '~nobody-here': nothing",
        ),
        ({"run_dir": ""}, "run_dir: is empty: name a directory of its own"),
        ({"gateway": {"host": ""}}, "gateway.host: is empty: give an address of this machine, 0.0.0.0 for all"),
        (drafting(proposer="mtp", model=""), "models[0].rank.speculation.model: is empty: name a directory"),
        ({"run_dir": "/" + 90 * "x"}, "run_dir: socket path is"),
        ({"run_dir": "/tmp/a;b"}, "run_dir: '/tmp/a;b' may hold only"),
        (drafting(num_draft_tokens=17), "models[0].rank.speculation.num_draft_tokens: must be 1..16, got 17"),
        (drafting(proposer="eagle9"), "models[0].rank.speculation.proposer: expected 'none' or 'n_gram' or"),
        (drafting(proposer="draft_model"), "models[0].rank.speculation.model: missing"),
        (drafting(proposer="mtp"), "models[0].rank.speculation.model: missing"),
        (
            drafting(proposer="draft_model", model="x", num_layers=2),
            "models[0].rank.speculation.model: not together with num_layers",
        ),
        (drafting(num_layers=2), "models[0].rank.speculation.num_layers: only proposer 'draft_model' has layers"),
        (drafting(model="x"), "models[0].rank.speculation.model: proposer 'n_gram' has no model; remove it"),
        (drafting(draft_sampling="sampled"), "models[0].rank.speculation.draft_sampling: proposer 'n_gram' draws no"),
        (
            drafting(proposer="draft_model", num_layers=2, head_tokens="all"),
            "models[0].rank.speculation.head_tokens: only proposer 'mtp' has a head",
        ),
        (
            drafting(proposer="draft_model", num_layers=2, head_ranks="leader"),
            "models[0].rank.speculation.head_ranks: only proposer 'mtp' has a head; remove it",
        ),
        (drafting(draft_vocab=9), "models[0].rank.speculation.draft_vocab: proposer 'n_gram' has no head; remove it"),
        (
            drafting(proposer="mtp", model="x", draft_vocab_ids="ids.json"),
            "models[0].rank.speculation.draft_vocab: missing",
        ),
        (
            drafting(proposer="mtp", model="x", draft_vocab=0),
            "models[0].rank.speculation.draft_vocab: must be at least 1, got 0",
        ),
        (drafting(draft_lengths=[[4, 9]]), "models[0].rank.speculation.draft_lengths: drafts must be 0..3"),
        (
            drafting(draft_lengths=[[3_000_000_000, 2]]),
            "models[0].rank.speculation.draft_lengths: batch sizes must be at most 2147483647, got 3000000000",
        ),
        (
            drafting(proposer="none", draft_lengths=[]),
            "models[0].rank.speculation.draft_lengths: proposer 'none' drafts nothing; remove it",
        ),
        (
            drafting(proposer="none", num_draft_tokens=5),
            "models[0].rank.speculation.num_draft_tokens: proposer 'none' drafts nothing; remove it",
        ),
        (
            drafting(proposer="draft_model", model="random:tiny?seed=2"),
            "models[0].rank.speculation.model: must be a directory, got 'random:tiny?seed=2': "
            "`bouquet pull 'random:tiny?seed=2'` prints one",
        ),
        ({"rank": {"speculation": {"proposer": "mtp", "model": "hf:a/b"}}}, "rank.speculation.model: must be a dir"),
        (drafting(draft_lengths=[[8, 2], [4, 1]]), "models[0].rank.speculation.draft_lengths: batch sizes must"),
        (
            drafting(draft_lengths=[[4]]),
            "models[0].rank.speculation.draft_lengths[0]: expected a list of a whole number and a whole",
        ),
        ({"gateway": {"max_request_tokens": 3_000_000}}, "models[0].scheduler.max_pending_tokens: 2000000 is less"),
    ],
)
def test_problems_name_the_key(raw: dict[str, Any], expected: str) -> None:
    assert [line for line in problems(raw) if line.startswith(expected)], problems(raw)


def test_all_problems_are_told_at_once() -> None:
    found = problems({"gateway": {"port": 0, "hots": "x"}, "models": [{"replicas": 99}]})
    keys = {line.partition(":")[0] for line in found}
    assert keys == {"gateway.port", "gateway.hots", "models[0].replicas", "models[0].name", "models[0].source"}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read"):
        load_config(tmp_path / "missing.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[gateway\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(bad)


@pytest.mark.parametrize(
    "line", ["a = " + "[" * 3000 + "]" * 3000, "a" + ".a" * 3000 + " = 1"], ids=["lists", "tables"]
)
def test_a_file_that_is_nested_too_deep(line: str, tmp_path: Path) -> None:
    file = tmp_path / "bouquet.toml"
    file.write_text(line)
    for load in (load_config, load_run_dir):
        with pytest.raises(ConfigError, match=r"bouquet\.toml: its tables or lists.* are nested too deep"):
            load(file)
    file.write_text('[[models]]\nname = "m"\nsource = "m"\n')
    with pytest.raises(ConfigError, match="nested too deep"):
        load_config(file, [f"rank={'[' * 3000}{']' * 3000}"])


def test_a_run_dir_of_nobody_is_no_place_to_look(tmp_path: Path) -> None:
    file = tmp_path / "bouquet.toml"
    file.write_text('run_dir = "~nobody-here/x"\n')
    with pytest.raises(ConfigError, match=r"^run_dir: '~nobody-here/x': nothing is known"):
        load_run_dir(file)


def test_overrides_reach_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "bouquet.toml"
    file.write_text('[[models]]\nname = "m-1.5"\nsource = "./m"\n')
    given = ["gateway.port=9000", "gateway.host=0.0.0.0", "models[m-1.5].replicas=2", "models[0].rank.device=cpu"]
    config = load_config(file, given)
    assert (config.gateway.port, config.gateway.host) == (9000, "0.0.0.0")
    assert (config.models[0].replicas, config.models[0].rank.device) == (2, "cpu")


def test_the_run_configuration_survives_its_file(tmp_path: Path) -> None:
    run = RunConfig(build({"gateway": {"port": 9}}), {"m": "/models/m"})
    write_run_config(tmp_path / "config.json", run)
    assert read_run_config(tmp_path / "config.json") == run
    assert run.paths() == {"m": Path("/models/m")}
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run_config(tmp_path / "config.json")


def test_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOUQUET_CONFIG", "/etc/x.toml")
    assert find_config(None) == Path("/etc/x.toml")
    assert find_config("given.toml") == Path("given.toml")
    monkeypatch.delenv("BOUQUET_CONFIG")
    monkeypatch.chdir(tmp_path)
    assert find_config(None).is_file()  # the project's own
    (tmp_path / "bouquet.toml").touch()
    assert find_config(None) == Path("bouquet.toml")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_cache_dir() == Path("/cache/bouquet")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-here")
    with pytest.raises(ConfigError, match="cache_dir: missing, and this user has no home directory"):
        default_cache_dir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert visible_gpus() == ["3", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
