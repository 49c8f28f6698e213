"""Makes the goldens anew: python -m tests.goldens.make DIRECTORY, the directory of SmolLM2 with model.gguf.

Run by hand, with transformers and accelerate, which its GGUF path needs. The weights come by that path, the tokens by
transformers' forward pass with its own cache: nothing of rose takes part.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from tests.goldens import NUM_TOKENS, GoldenPrompt, Goldens
from tests.rose.tiny_lm import VOCAB_SIZE, write_llama, write_qwen3

TINY_LEAD = 0.01
TINY_VARIETY = 16
TINY_LENGTHS = (1, 2, 5, 16, 17, 40, 100, 300)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONSTITUTION = """\
We the People of the United States, in Order to form a more perfect Union, establish Justice, insure domestic \
Tranquility, provide for the common defence, promote the general Welfare, and secure the Blessings of Liberty to \
ourselves and our Posterity, do ordain and establish this Constitution for the United States of America.

Article I, Section 1. All legislative Powers herein granted shall be vested in a Congress of the United States, which \
shall consist of a Senate and House of Representatives.

Section 2. The House of Representatives shall be composed of Members chosen every second Year by the People of the \
several States, and the Electors in each State shall have the Qualifications requisite for Electors of the most \
numerous Branch of the State Legislature. No Person shall be a Representative who shall not have attained to the Age \
of twenty five Years, and been seven Years a Citizen of the United States, and who shall not, when elected, be an \
Inhabitant of that State in which he shall be chosen.

Section 3."""


def chat(*turns: str, system: str = SYSTEM) -> str:
    """User and assistant by turns, as SmolLM2's template writes them, up to where the assistant begins."""
    roles = ("user", "assistant") * len(turns)
    messages = [("system", system), *zip(roles, turns, strict=False)]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


PROMPTS = {
    "one token": "The",
    "english": "The capital of France is",
    "story": "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "python": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics",',
    "digits": "1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048,",
    "arithmetic": "Q: What is 317 + 468?\nA: 317 + 468 = 785\n\nQ: What is 1250 - 375?\nA:",
    "french": "La Révolution française commença en 1789 et",
    "chinese": "中国的首都是北京。日本的首都是",
    "arabic and emoji": "مرحبا بالعالم 🌍 means",
    "chat": chat("What is gravity?"),
    "chat of three turns": chat(
        "Name three primary colours.", "Red, blue and yellow.", "Which of them is the colour of a lemon?"
    ),
    "long": CONSTITUTION,
}


def golden(model: Any, name: str, text: str, prompt_ids: list[int]) -> GoldenPrompt:
    model.generation_config.eos_token_id = None  # go on past an end
    output = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[0, len(prompt_ids) :]
    logits = torch.cat(output.logits).double()
    logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    first, second = logits.topk(2).values.T
    prompt = GoldenPrompt(name, text, prompt_ids, tokens.tolist(), rounded(logprobs), rounded(first - second))
    print(f"{name}: {len(prompt_ids)} tokens, smallest lead {min(prompt.margins)}, {len(set(prompt.tokens))} ids")
    return prompt


def rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def write(name: str, prompts: list[GoldenPrompt]) -> None:
    made_with = {"transformers": transformers.__version__, "torch": str(torch.__version__), "dtype": "float32"}
    raw = msgspec.json.encode(Goldens(made_with, prompts))
    lines = raw.replace(b'{"name"', b'\n{"name"') + b"\n"  # a line for each prompt
    (Path(__file__).parent / f"{name}.json").write_bytes(lines)


def make_tiny(name: str, write_model: Callable[[Path], Path]) -> None:
    """Random prompts that lead to no near tie and to no few tokens again and again."""
    with tempfile.TemporaryDirectory() as directory:
        model = transformers.AutoModelForCausalLM.from_pretrained(write_model(Path(directory)), dtype=torch.float32)
    random, prompts = np.random.default_rng(0), []
    for length in TINY_LENGTHS:
        while True:
            ids = random.integers(3, VOCAB_SIZE, length).tolist()
            prompt = golden(model.eval(), f"{length} random ids", "", ids)
            if min(prompt.margins) > TINY_LEAD and len(set(prompt.tokens)) > TINY_VARIETY:
                prompts.append(prompt)
                break
    write(name, prompts)


def main() -> None:
    directory = Path(sys.argv[1])
    make_tiny("tiny_llama", write_llama)
    make_tiny("tiny_qwen3", write_qwen3)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, gguf_file="model.gguf", dtype=torch.float32)
    write("smollm2", [golden(model.eval(), name, text, tokenizer.encode(text).ids) for name, text in PROMPTS.items()])


if __name__ == "__main__":
    main()
