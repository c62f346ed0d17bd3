"""Conversations of many turns, and the loop that runs them on any engine, vLLM among them.

This file also runs inside the peer's interpreter, where pagefold is not installed: nothing but the standard library is
imported until vLLM is.
"""

import heapq
import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, NamedTuple

WARM_UP_TOKENS, WARM_UP_PROMPT = 4, 8192


@dataclass(frozen=True)
class Chats:
    """Conversations in token ids. A request is a whole history: earlier user tokens, what the engine answered, and the
    new user tokens. End-of-sequence ids are ignored, so that every engine does the same work.

    turns         [conversation][turn]: new user tokens
    output_len    tokens to answer each turn with
    temperature   of the draws; 0 is greedy
    think_s       mean seconds from an answer to the next turn, exponentially distributed; None: by rounds, a turn of
                  all conversations when the one before has been answered in all
    """

    turns: list[list[list[int]]]
    output_len: int
    temperature: float = 0.0
    think_s: float | None = None

    @property
    def max_len(self) -> int:
        """Tokens of the longest history with its last answer."""
        return max(sum(map(len, turns)) + self.output_len * len(turns) for turns in self.turns)

    @property
    def num_rounds(self) -> int:
        return max(map(len, self.turns))

    def warm_up(self) -> "Chats":
        """The shapes of the first turns without their tokens."""
        first = [[[1] * min(len(turns[0]), WARM_UP_PROMPT)] for turns in self.turns]
        return Chats(first, min(WARM_UP_TOKENS, self.output_len), self.temperature)


class Progress(NamedTuple):
    """What an engine says of a request after a step.

    ids      all tokens it has answered with
    cached   tokens of the prompt that it did not compute
    """

    id: str
    ids: list[int]
    finished: bool
    cached: int


@dataclass
class Answer:
    """One turn of one conversation. Times are seconds since the start.

    prompt_len   tokens of the history that was submitted, `cached` of them not computed
    """

    chat: int
    turn: int
    prompt_len: int
    asked_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    cached: int = 0
    output_len: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.asked_s


def run_chats(
    chats: Chats, add: Callable[[str, list[int]], None], step: Callable[[], Iterable[Progress]], seed: int = 0
) -> list[Answer]:
    """Run all conversations to their end; answers in the order in which they were asked.

    add    hands over a request (id, prompt) that asks for `chats.output_len` tokens
    step   has the engine compute a step; the requests that changed
    """
    random, clock, start = Random(seed), time.perf_counter, time.perf_counter()
    histories: list[list[int]] = [[] for _ in chats.turns]
    answers: list[Answer] = []
    running: dict[str, Answer] = {}
    due = [(0.0, chat, 0) for chat in range(len(chats.turns))]  # (when, conversation, turn), a heap
    later: list[tuple[int, int]] = []  # of the next round
    while due or running or later:
        now = clock() - start
        if later and not running and not due:
            due, later = [(now, *turn) for turn in sorted(later)], []
        while due and due[0][0] <= now:
            _, chat, turn = heapq.heappop(due)
            histories[chat] = histories[chat] + chats.turns[chat][turn]
            answer = Answer(chat, turn, len(histories[chat]), clock() - start)
            answers.append(answer)
            running[f"{chat}.{turn}"] = answer
            add(f"{chat}.{turn}", histories[chat])
        if not running:
            time.sleep(max(0.0, due[0][0] - (clock() - start)))
            continue
        progress, now = step(), clock() - start
        for id, ids, finished, cached in progress:
            answer = running[id]
            if ids and not answer.first_s:
                answer.first_s = now
            if not finished:
                continue
            del running[id]
            answer.last_s, answer.cached, answer.output_len = now, cached, len(ids)
            histories[answer.chat] = histories[answer.chat] + ids
            if answer.turn + 1 == len(chats.turns[answer.chat]):
                continue
            if chats.think_s is None:
                later.append((answer.chat, answer.turn + 1))
            else:
                wait = random.expovariate(1 / chats.think_s) if chats.think_s else 0.0
                heapq.heappush(due, (now + wait, answer.chat, answer.turn + 1))
    return answers


# From here on: what runs inside the peer's interpreter.


def chat_with_vllm(job: dict[str, Any], count_preemptions: Callable[[Any], Callable[[], int | None]]) -> dict[str, Any]:
    """The chats of a job on vLLM's offline engine, with prefix caching on.

    count_preemptions   makes a function that counts them from an engine
    """
    vllm = importlib.import_module("vllm")
    chats, clock = Chats(**job["chats"]), time.perf_counter
    start = clock()
    options = {
        "max_model_len": chats.max_len,
        "max_num_seqs": len(chats.turns),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    llm = vllm.LLM(model=job["model"], dtype=job["dtype"], skip_tokenizer_init=True, **options | job["options"])
    init_s, engine = clock() - start, llm.llm_engine
    how = {"temperature": chats.temperature, "ignore_eos": True, "detokenize": False}

    def run(work: Chats) -> list[Answer]:
        params = vllm.SamplingParams(max_tokens=work.output_len, **how)

        def step() -> list[Progress]:
            return [
                Progress(out.request_id, list(out.outputs[0].token_ids), out.finished, out.num_cached_tokens or 0)
                for out in engine.step()
            ]

        return run_chats(work, lambda id, prompt: engine.add_request(id, {"prompt_token_ids": prompt}, params), step)

    run(chats.warm_up())
    llm.reset_prefix_cache()
    preemptions = count_preemptions(llm)
    answers = run(chats)
    return {
        "version": vllm.__version__,
        "init_s": init_s,
        "preemptions": preemptions(),
        "answers": [asdict(answer) for answer in answers],
    }
