"""Straight-line programs, solved line by line: a long chain of thought that looks something up at every step.

A prompt is a program of assignments modulo 13 and a question; the answer is the program worked out, each line with its
operands' values filled in, and then the asked value:

    bos  x = 4 + 9 ;  y = x * x ;  ? y think      ->      x = 4 + 9 = 0 ;  y = 0 * 0 = 0 ;  ? y = 0 eos

Operands are used as in derivations: half are recent, a third are a few "hub" variables used again and again, the rest
come from anywhere. A cache that keeps recent rows and those that are looked at often can stay right; one that keeps
only recent rows cannot. A token is an id; there is no text.
"""

import torch
from torch import Tensor

from pagefold.core.types import InputError
from pagefold.eval.answers import Answer, Task

PAD, BOS, EOS, EQUALS, SEMICOLON, PLUS, MINUS, TIMES, ASK, THINK = range(10)
VALUES, NAMES, VOCAB = 16, 32, 256  # ids of the value 0, of the first variable, and how many ids there are
MODULUS = 13
PROMPT_LINE, ANSWER_LINE, ANSWER_END = 6, 8, 5  # tokens of a line in both parts, and of the answer after its lines
MAX_LINES = VOCAB - NAMES

HUBS, FIRST_LINES = 6, 3  # hubs per program; lines after the first that are mostly constants
RECENT, HUB = 0.5, 0.35  # shares of the operands; the rest comes from anywhere
DECAY = 0.35  # a recent operand is an exponential of this rate, in lines, back
CONSTANTS, FIRST_CONSTANTS = 0.12, 0.6  # shares of the operands that are numbers


def prompt_length(lines: int) -> int:
    return 1 + PROMPT_LINE * lines + 3


def answer_length(lines: int) -> int:
    """Tokens of the answer, EOS included."""
    return ANSWER_LINE * lines + ANSWER_END


def split_answer(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts and answers of whole programs ids[..., T]."""
    lines = (ids.shape[-1] - prompt_length(0) - answer_length(0)) // (PROMPT_LINE + ANSWER_LINE)
    prompt, answer = ids.split([prompt_length(lines), answer_length(lines)], dim=-1)
    return prompt, answer


def draw_programs(num: int, lines: int, generator: torch.Generator, plain: float = 0.0) -> Tensor:
    """Draw programs with their answers: int64[num, prompt_length + answer_length] ids, on the generator's device.

    plain   share of programs in which all operands come from anywhere and none but the first line's are numbers: short
            ones, where there is little to look up otherwise, teach more that way

    Everything random is drawn at once; only the values are computed line after line. Raises InputError for more lines
    than there are names.
    """
    if not 1 <= lines <= MAX_LINES:
        raise InputError("lines", f"got {lines}, must be in [1, {MAX_LINES}]")
    device = generator.device
    name, source, number, is_number, operator, asked = _draw_structure(num, lines, generator, plain)
    x = torch.arange(MODULUS, device=device)
    results = torch.stack([x[:, None] + x, x[:, None] - x, x[:, None] * x]).remainder(MODULUS).flatten()
    operand, value = torch.empty_like(number), torch.zeros(num, lines, dtype=torch.long, device=device)
    at_result = torch.tensor([MODULUS, 1], device=device)
    for i in range(lines):
        operand[:, i] = torch.where(is_number[:, i], number[:, i], value.gather(1, source[:, i]))
        value[:, i] = results[operator[:, i] * MODULUS**2 + (operand[:, i] * at_result).sum(1)]

    ids = torch.empty(num, prompt_length(lines) + answer_length(lines), dtype=torch.long, device=device)
    ids[:, 0] = BOS
    prompt, question, answer, end = ids[:, 1:].split([PROMPT_LINE * lines, 3, ANSWER_LINE * lines, ANSWER_END], dim=1)
    written = torch.where(is_number, number + VALUES, name.gather(1, source.flatten(1)).view_as(source))
    a, b = (operand + VALUES).unbind(2)
    _fill(prompt.unflatten(1, (lines, -1)), name, EQUALS, written[..., 0], operator + PLUS, written[..., 1], SEMICOLON)
    _fill(
        answer.unflatten(1, (lines, -1)), name, EQUALS, a, operator + PLUS, b, EQUALS, value + VALUES, SEMICOLON
    )  # fmt: skip
    asked_name, asked_value = (x.gather(1, asked)[:, 0] for x in (name, value + VALUES))
    _fill(question, ASK, asked_name, THINK)
    _fill(end, ASK, asked_name, EQUALS, asked_value, EOS)
    return ids


def _draw_structure(num: int, lines: int, generator: torch.Generator, plain: float) -> tuple[Tensor, ...]:
    """What is random in a program: names [num, lines]; for each operand [num, lines, 2] the line it comes from, a
    number, and whether it is that number; operators [num, lines], 0 to 2; the line that is asked for [num, 1]."""
    device = generator.device
    shape = (num, lines, 2)
    random = lambda *size: torch.rand(size, generator=generator, device=device)  # noqa: E731
    integer = lambda high, *size: torch.randint(high, size, generator=generator, device=device)  # noqa: E731
    line = torch.arange(lines, device=device)[:, None]
    back = (-random(*shape).clamp_min(1e-6).log() / DECAY).long()
    recent = (line - 1 - back).clamp_min(0)
    hubs = integer(max(1, lines // 3), num, HUBS)
    hub = hubs.gather(1, integer(HUBS, num, lines * 2)).view(shape)
    hub = torch.where(hub < line, hub, recent)
    anywhere = (random(*shape) * line).long()
    is_plain = random(num, 1, 1) < plain
    kind = torch.where(is_plain, 1.0, random(*shape))
    source = torch.where(kind < RECENT, recent, torch.where(kind < RECENT + HUB, hub, anywhere))
    share = torch.where(line > FIRST_LINES, CONSTANTS, FIRST_CONSTANTS)
    share = torch.where(line > 0, torch.where(is_plain, 0.0, share), 1.0)
    names = random(num, MAX_LINES).argsort(1)[:, :lines] + NAMES
    return (
        names,
        source,
        integer(MODULUS, *shape),
        random(*shape) < share,
        integer(3, num, lines),
        integer(lines, num, 1),
    )


def _fill(out: Tensor, *columns: Tensor | int) -> None:
    """Write one id, or a tensor of ids, into each column of the last dimension."""
    for i, column in enumerate(columns):
        out[..., i] = column


def chains_task(num: int, lines: int, seed: int = 0) -> Task:
    """`num` programs as problems. An answer passes if the value it ends with is right; it is marked `thought` if all
    lines are right too. A quarter more tokens than the right answer needs are allowed for."""
    programs = draw_programs(num, lines, torch.Generator().manual_seed(seed))
    prompts, answers = (part.tolist() for part in split_answer(programs))

    def check(index: int, answer: Answer) -> dict[str, bool]:
        given, expected = list(answer.token_ids), answers[index]
        return {"passed": given[-ANSWER_END:] == expected[-ANSWER_END:], "thought": given == expected}

    settings = {"programs": num, "lines": lines, "programs_seed": seed}
    return Task("chains", settings, [tuple(prompt) for prompt in prompts], answer_length(lines) * 5 // 4, check)
