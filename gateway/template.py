"""What is put around a text before it is encoded: a model's prompts, and the template of a generative reranker."""

from collections.abc import Mapping

from msgspec import Struct

from gateway.errors import InvalidRequest
from gateway.tokenize import TextTokenizer

QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


class Prompts(Struct, frozen=True):
    """The `prompts` of config_sentence_transformers.json; a prompt is put before the text."""

    texts: dict[str, str] = {}
    default: str | None = None

    def get(self, name: str | None) -> str:
        """The prompt `name`, or the default one. Raises InvalidRequest for a name the model does not have."""
        if name is None:
            return self.texts.get(self.default, "") if self.default else ""
        if name not in self.texts:
            known = ", ".join(sorted(self.texts)) or "none"
            raise InvalidRequest(
                f"prompt_name is {name[:100]!r}; the model's prompts are: {known}", param="prompt_name"
            )
        return self.texts[name]

    def first(self, names: tuple[str, ...]) -> str:
        """The first prompt of `names` that the model has, else the default one."""
        return next((self.texts[name] for name in names if self.texts.get(name)), self.get(None))

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "Prompts":
        prompts = config.get("prompts")
        default = config.get("default_prompt_name")
        texts = {str(k): v for k, v in prompts.items() if isinstance(v, str)} if isinstance(prompts, dict) else {}
        return cls(texts, default if isinstance(default, str) else None)


# Qwen3-Reranker's template, as its model card gives it.
RERANKER_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
RERANKER_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANKER_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class RerankTemplate(Struct, frozen=True):
    """The template with its fixed ends already encoded."""

    prefix: list[int]
    suffix: list[int]

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> "RerankTemplate":
        return cls(tokenizer.special_ids(RERANKER_PREFIX), tokenizer.special_ids(RERANKER_SUFFIX))

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def frame(self, ids: list[int]) -> list[int]:
        return self.prefix + ids + self.suffix


def reranker_head(query: str, instruction: str | None) -> str:
    """The middle part up to the document, which follows directly."""
    return f"<Instruct>: {instruction or RERANKER_INSTRUCTION}\n<Query>: {query}\n<Document>: "
