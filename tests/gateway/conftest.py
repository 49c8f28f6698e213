"""A gateway served for real (its own serve()) before fake schedulers, with a model of a tiny tokenizer."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gateway.app import serve
from gateway.config import GatewayConfig
from ipc.types import ModelFacts
from tests.gateway.fake_scheduler import FakeScheduler, chat_facts

WORDS = ["hello", "world", "what", "is", "a", "tulip", "the", "red", "flower", "query", "long", "un", "##able"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tiny_tokenizer() -> Tokenizer:
    """A BERT tokenizer of about a hundred tokens, with the truncation and padding that such files come with."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789[].,!?")
    vocab = [*SPECIALS, *letters, *(f"##{c}" for c in letters), *(w for w in WORDS if len(w) > 1)]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(dict.fromkeys(vocab))}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIALS)
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


CHAT_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE as language models have it: three special tokens, then a token for each byte and a few words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("e", "l"), ("l", "o"), ("el", "lo"), ("h", "ello"), ("Ġ", "w"), ("o", "r")]
    vocab = [*CHAT_SPECIALS, *alphabet, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CHAT_SPECIALS)
    return tokenizer


def write_chat_model(directory: Path) -> Path:
    """A language model's directory without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "model_max_length": 8192}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_model(directory: Path, **config: Any) -> Path:
    """A model directory without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "type_vocab_size": 2} | config))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))
    return directory


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Stack:
    """One gateway and the fake schedulers of its models."""

    run_dir: Path
    port: int
    http: aiohttp.ClientSession
    stop: asyncio.Event
    task: asyncio.Task[None]
    events: list[tuple[str, dict[str, object]]]
    schedulers: dict[str, FakeScheduler] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    version: int = 0

    def write_replicas(self) -> None:
        listed: dict[str, Any] = {}
        for replica, scheduler in self.schedulers.items():
            state = "draining" if replica in self.draining else "active"
            entry = {"id": replica, "endpoint": scheduler.endpoint, "state": state}
            listed.setdefault(replica.partition("/")[0], {"replicas": []})["replicas"].append(entry)
        self.version += 1
        partial = self.run_dir / "replicas.partial"
        partial.write_text(json.dumps({"version": self.version, "models": listed}))
        partial.rename(self.run_dir / "replicas.json")

    async def add(self, replica: str, model_facts: ModelFacts | None = None) -> FakeScheduler:
        scheduler = FakeScheduler.at(self.run_dir / f"{replica.replace('/', '-')}.sock", model_facts)
        self.schedulers[replica] = scheduler
        self.write_replicas()
        await until(lambda: bool(scheduler.gateways))
        return scheduler

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(path, json=body, headers=named) as response:
            return response.status, await response.json()

    async def embed(self, text: object = "hello world", model: str = "tiny", **fields: object) -> tuple[int, Any]:
        return await self.post("/v1/embeddings", {"model": model, "input": text, **fields})

    async def ready(self) -> int:
        async with self.http.get("/health/ready") as response:
            return response.status

    async def metric(self, name: str) -> float:
        """A figure of the gateway's own that has no labels."""
        async with self.http.get("/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith(f'{name}{{process="gateway/0"'):
                    return float(line.rpartition(" ")[2])
        return 0.0


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits for `condition`, and fails when it does not come."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "what was waited for did not happen"
        await asyncio.sleep(0.01)


MakeStack = Callable[..., Coroutine[Any, Any, Stack]]


@pytest_asyncio.fixture
async def make_stack(tmp_path: Path, tiny_dir: Path) -> AsyncIterator[MakeStack]:
    """Makes a Stack; `models` gives each model's directory and facts, every one with a single replica to start."""
    made: list[Stack] = []

    async def make(
        models: dict[str, tuple[Path, ModelFacts | None]] | None = None, num_replicas: int = 1, **settings: Any
    ) -> Stack:
        models = models or {"tiny": (tiny_dir, None)}
        run_dir = tmp_path / f"r{len(made)}"
        run_dir.mkdir()
        port, stop, events = free_port(), asyncio.Event(), list[tuple[str, dict[str, object]]]()
        schedulers = {
            f"{name}/{i}": FakeScheduler.at(run_dir / f"{name}-{i}.sock", model_facts)
            for name, (_, model_facts) in models.items()
            for i in range(num_replicas)
        }
        running = serve(
            config=GatewayConfig(port=port, **settings),
            models={name: directory for name, (directory, _) in models.items()},
            run_dir=run_dir,
            index=0,
            stop=stop,
            log=lambda event, **fields: events.append((event, fields)),
        )
        task = asyncio.ensure_future(running)
        http = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        stack = Stack(run_dir, port, http, stop, task, events, schedulers)
        made.append(stack)
        if schedulers:
            stack.write_replicas()
        await until(lambda: any(event == "listening" for event, _ in events) or task.done())
        for scheduler in schedulers.values():
            await until(lambda scheduler=scheduler: bool(scheduler.gateways))  # type: ignore[misc]
        return stack

    yield make
    for stack in made:
        await stack.http.close()
        stack.stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(stack.task, 10)
        for scheduler in stack.schedulers.values():
            scheduler.close()


@pytest_asyncio.fixture
async def chat_stack(make_stack: MakeStack, chat_dir: Path) -> Stack:
    """One language model `chat` at one fake scheduler."""
    return await make_stack({"chat": (chat_dir, chat_facts())})


@pytest_asyncio.fixture
async def stack(make_stack: MakeStack) -> Stack:
    return await make_stack()
