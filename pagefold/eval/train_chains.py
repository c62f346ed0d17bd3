"""`pagefold eval train-chains`: train a small Llama on straight-line programs (see `chains`), from nothing, in minutes.

Recall comes late and suddenly in a transformer, and programs that grow faster than the skill keep it from coming at
all. So a step is small (16k to 32k tokens), programs have two lines at first, lines are added only when every kind of
token of an answer's line is predicted right in 99 % of the places at the present length, and half of the batches have
fewer. No program is seen twice, so the accuracy on a batch before its step is that on unseen data.

Looking up a variable that a line's operand names is two recalls in a row, too much to be found at once. So questions
follow each training program, after the EOS at which an answer ends: `think x value`, each a single recall.

A greedy answer is right as a whole exactly if the model, given the right answer up to any token, ranks the next token
first. So the share of whole answers, the column `whole` of the log, is greedy pass@1 (of the thought) without decoding.
"""

import json
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from pagefold.core.types import InputError
from pagefold.eval.chains import (
    ANSWER_END,
    ANSWER_LINE,
    BOS,
    EOS,
    PAD,
    THINK,
    VOCAB,
    answer_length,
    draw_programs,
    prompt_length,
    split_answer,
)
from pagefold.eval.train_options import GROWING, TrainOptions

COLUMNS = ("name", "=", "a", "op", "b", "=", "result", ";", "recall", "end")  # kinds of tokens that are learnt
GATED = len(COLUMNS) - 1  # the end is mostly marks
PASS = 0.99  # accuracy of the weakest kind at which lines are added
GROWTH = 1.25
GAIN, EMBEDDING = 0.7, 0.3  # initial scale of a product's output, and of the embedding
PLAIN = 0.5  # share of the programs that look up more than the task's do
SHORTER = 0.5  # share of the batches with fewer lines than the present number
JUDGED = 20  # batches at the present length that are judged together
QUESTIONS, QUESTION = 16, 3  # questions after a program, one for each of its lines at most, and tokens of each
DRAWN_AHEAD = 16  # batches drawn at once, for drawing takes some launches per line
LOG_SECONDS = 10


# ---- the model: modules are named as in transformers, so that their weights are the checkpoint


def llama_config(o: TrainOptions) -> dict[str, Any]:
    """The model's config.json."""
    longest = prompt_length(o.most_lines) + answer_length(o.most_lines)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": o.hidden,
        "intermediate_size": o.intermediate,
        "num_hidden_layers": o.layers,
        "num_attention_heads": o.heads,
        "num_key_value_heads": o.kv_heads,
        "head_dim": o.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": o.rope_theta,
        "max_position_embeddings": max(2048, longest + QUESTION * QUESTIONS),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
    }


class Attention(nn.Module):
    def __init__(self, o: TrainOptions):
        super().__init__()
        self.head_dim = o.head_dim
        self.q_proj = nn.Linear(o.hidden, o.heads * o.head_dim, bias=False)
        self.k_proj = nn.Linear(o.hidden, o.kv_heads * o.head_dim, bias=False)
        self.v_proj = nn.Linear(o.hidden, o.kv_heads * o.head_dim, bias=False)
        self.o_proj = nn.Linear(o.heads * o.head_dim, o.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in self._qkv)
        q, k = (rotate(y, cos, sin) for y in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    @property
    def _qkv(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x[B, H, T, D] by cos, sin [T, D/2], in float32; returns x's dtype."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, o: TrainOptions):
        super().__init__()
        self.gate_proj = nn.Linear(o.hidden, o.intermediate, bias=False)
        self.up_proj = nn.Linear(o.hidden, o.intermediate, bias=False)
        self.down_proj = nn.Linear(o.intermediate, o.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, o: TrainOptions):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(o.hidden, eps=1e-6)
        self.self_attn = Attention(o)
        self.post_attention_layernorm = nn.RMSNorm(o.hidden, eps=1e-6)
        self.mlp = MLP(o)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, o: TrainOptions):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, o.hidden)
        self.layers = nn.ModuleList(Block(o) for _ in range(o.layers))
        self.norm = nn.RMSNorm(o.hidden, eps=1e-6)


class Llama(nn.Module):
    """Logits of the last `keep` tokens: ids int64[B, T] -> [B, keep, vocab]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, o: TrainOptions):
        super().__init__()
        self.model = Trunk(o)
        self.lm_head = nn.Linear(o.hidden, VOCAB, bias=False)
        frequencies = o.rope_theta ** (-torch.arange(0, o.head_dim, 2) / o.head_dim)
        angles = torch.outer(torch.arange(llama_config(o)["max_position_embeddings"]).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                std = EMBEDDING if "embed" in name else GAIN / math.sqrt(p.shape[1])
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=std / math.sqrt(2 * o.layers) if into_residual else std)

    def forward(self, ids: Tensor, keep: int) -> Tensor:
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.model.embed_tokens(ids)
        for block in self.model.layers:
            x = block(x, cos, sin)
        return self.lm_head(self.model.norm(x[:, -keep:]))


# ---- data and curriculum


def ask(programs: Tensor, lines: int, generator: torch.Generator) -> Tensor:
    """Append questions for lines drawn at random to programs int64[B, T]: int64[B, T + QUESTION * questions]."""
    size = (len(programs), min(lines, QUESTIONS))
    asked = torch.randint(lines, size, generator=generator, device=programs.device)
    worked = split_answer(programs)[1][:, : ANSWER_LINE * lines].unflatten(1, (lines, ANSWER_LINE))
    names, values = (worked[:, :, column].gather(1, asked) for column in (0, ANSWER_LINE - 2))
    questions = torch.stack([torch.full_like(names, THINK), names, values], dim=2)
    return torch.cat([programs, questions.flatten(1)], dim=1)


class Programs:
    """Batches of programs that were never seen before, of any number of lines, with questions."""

    def __init__(self, tokens: int, generator: torch.Generator):
        self.tokens, self.generator = tokens, generator
        self._drawn: dict[int, Iterator[Tensor]] = {}

    def take(self, lines: int) -> Tensor:
        """int64[B, T] ids of programs of `lines` lines, B * T about `tokens`."""
        batch = next(self._drawn.get(lines, iter(())), None)
        if batch is None:
            length = prompt_length(lines) + answer_length(lines) + QUESTION * min(lines, QUESTIONS)
            size = max(1, round(self.tokens / length))
            drawn = draw_programs(size * DRAWN_AHEAD, lines, self.generator, PLAIN)
            self._drawn[lines] = iter(ask(drawn, lines, self.generator).split(size))
            batch = next(self._drawn[lines])
        return batch


class Curriculum:
    """How many lines programs have: more as soon as each kind of token is right in `PASS` of the places."""

    def __init__(self, first: int, most: int, seed: int):
        self.lines, self.most = first, most
        self._draw = random.Random(seed)
        self._recent: deque[Tensor] = deque(maxlen=JUDGED)
        self._unread = 0

    def next_lines(self) -> int:
        if self.lines > 2 and self._draw.random() < SHORTER:
            return self._draw.randrange(2, self.lines)
        return self.lines

    def record(self, right: Tensor) -> bool:
        """Take the shares `score` of a batch of the present length; True if lines were added because of it.

        They are read from the device once in `JUDGED` batches only.
        """
        self._recent.append(right)
        self._unread += 1
        if self._unread < JUDGED or self.lines == self.most:
            return False
        self._unread = 0
        if self.accuracy[:GATED].min() < PASS:
            return False
        self.lines = min(self.most, max(self.lines + 1, int(self.lines * GROWTH)))
        self._recent.clear()
        return True

    @property
    def accuracy(self) -> Tensor:
        """Mean of the recent shares, float32[columns + 1] on the host; NaN before the first."""
        if not self._recent:
            return torch.full((len(COLUMNS) + 1,), torch.nan)
        return torch.stack(list(self._recent)).mean(0).cpu()


def score(logits: Tensor, targets: Tensor, lines: int) -> Tensor:
    """Shares that are predicted right: of each kind in `COLUMNS` (recall is NaN without questions), then of whole
    answers; float32[columns + 1].

    logits [B, N, vocab] for targets int64[B, N]: an answer of `lines` lines, and questions
    """
    right = (logits.argmax(-1) == targets).float()
    answer, questions = right[:, : answer_length(lines)], right[:, answer_length(lines) :]
    worked, end = answer.split([ANSWER_LINE * lines, ANSWER_END], dim=1)
    of_kind = worked.unflatten(1, (lines, ANSWER_LINE)).mean((0, 1))
    recall = questions[:, QUESTION - 1 :: QUESTION].mean()
    return torch.cat([of_kind, torch.stack([recall, end.mean(), answer.amin(1).mean()])])


def loss_of(logits: Tensor, targets: Tensor, lines: int) -> Tensor:
    """Mean over the tokens of the answers, plus mean over the values that are asked for, in nats."""
    length = answer_length(lines)
    parts = [(logits[:, :length], targets[:, :length])]
    parts += [(logits[:, length + QUESTION - 1 :: QUESTION], targets[:, length + QUESTION - 1 :: QUESTION])]
    return torch.stack([F.cross_entropy(x.flatten(0, 1).float(), y.flatten()) for x, y in parts]).sum()


# ---- training


class Trainer:
    """A model, its optimizer, and one step at a time."""

    def __init__(self, options: TrainOptions):
        self.options = options
        device = torch.device(options.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise InputError("device", "got 'cuda', and no CUDA device is visible")
        torch.manual_seed(options.seed)
        self.model = Llama(options).to(device)
        self._forward: Any = torch.compile(self.model, dynamic=True) if options.compile else self.model
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)
        generator = torch.Generator(device).manual_seed(options.seed)
        self.programs = Programs(options.tokens, generator)
        self.curriculum = Curriculum(options.first_lines, options.most_lines, options.seed)
        self.steps = self.tokens = 0

    def learning_rate(self, progress: float) -> float:
        """Of the next step, where `progress` is the share of the wall time that has passed."""
        warm = min(1.0, (self.steps + 1) / self.options.warmup)
        left = min(1.0, (1.0 - progress) / (1.0 - self.options.decay_from))
        least = GROWING if self.curriculum.lines < self.curriculum.most else 0.0
        return self.options.lr * warm * max(least, left)

    def step(self, progress: float) -> bool:
        """One step; True if the programs grow after it."""
        lines = self.curriculum.next_lines()
        ids = self.programs.take(lines)
        logits, targets = self.predict(ids, lines)
        loss_of(logits, targets, lines).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(progress)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.tokens += ids.numel()
        return lines == self.curriculum.lines and self.curriculum.record(score(logits.detach(), targets, lines))

    def predict(self, ids: Tensor, lines: int) -> tuple[Tensor, Tensor]:
        """Logits [B, N, vocab] that predict what follows the prompts of programs ids[B, T], and that, int64[B, N]."""
        targets = ids[:, prompt_length(lines) :]
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            return self._forward(ids[:, :-1], targets.shape[1]), targets

    @torch.no_grad()
    def whole_answers(self, lines: int, num: int = 200) -> float:
        """Share of `num` new programs whose whole answer is right by greedy decoding (see the module's text)."""
        ids = draw_programs(num, lines, self.programs.generator)
        right = [score(*self.predict(part, lines), lines)[-1] * len(part) for part in ids.split(16)]
        return float(torch.stack(right).sum() / num)

    def save(self, out: Path) -> None:
        """Write config.json and model.safetensors, in bfloat16."""
        out.mkdir(parents=True, exist_ok=True)
        weights = {name: p.detach().to("cpu", torch.bfloat16) for name, p in self.model.named_parameters()}
        draft = out / "model.safetensors.part"
        save_file(weights, draft, metadata={"format": "pt"})
        os.replace(draft, out / "model.safetensors")
        (out / "config.json").write_text(json.dumps(llama_config(self.options), indent=2) + "\n")


def train(options: TrainOptions, out: Path, report: Callable[[str], object] = print) -> dict[int, float]:
    """Train for `options.minutes` and save to the directory `out`, whenever the model is better than what is there.

    report   told a line of figures every ten seconds
    Returns {lines: share of whole answers} at a fifth, a half and all of `options.most_lines`.
    """
    trainer = Trainer(options)
    curriculum = trainer.curriculum
    report(f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f}M parameters")
    start = logged = time.perf_counter()
    best, tokens = (0, 0.0), 0
    while (now := time.perf_counter()) - start < options.minutes * 60:
        progress = (now - start) / (options.minutes * 60)
        grown = trainer.step(progress)
        if not grown and now - logged < LOG_SECONDS:
            continue
        accuracy = curriculum.accuracy.tolist()
        report(_progress_line(trainer, now - start, progress, (trainer.tokens - tokens) / (now - logged), accuracy))
        logged, tokens = now, trainer.tokens
        reached = (curriculum.lines, 0.0 if math.isnan(accuracy[-1]) else accuracy[-1])
        if reached > best:
            best = reached
            trainer.save(out)
    trainer.save(out)
    whole = {}
    for lines in sorted({max(1, options.most_lines // part) for part in (5, 2, 1)}):
        whole[lines] = trainer.whole_answers(lines)
        report(f"{lines} lines: {100 * whole[lines]:.1f} % of 200 answers are right as a whole")
    return whole


def _progress_line(trainer: Trainer, seconds: float, progress: float, rate: float, accuracy: Sequence[float]) -> str:
    """The lines of programs, and how much is right at that length, in per cent; nothing yet just after they grew."""
    parts = [f"{seconds:4.0f} s", f"step {trainer.steps}", f"lines {trainer.curriculum.lines}"]
    parts += [f"lr {trainer.learning_rate(progress):.1e}", f"{rate:.3g} tok/s"]
    if not math.isnan(accuracy[0]):
        parts += [f"{kind} {100 * share:.2f}" for kind, share in zip((*COLUMNS, "whole"), accuracy, strict=True)]
    return "  ".join(parts)
