"""The offline API: `LLM(model, ...)`, `.generate`, `.chat`. Names are vLLM's, so that scripts move over."""

import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import count
from numbers import Integral
from operator import index
from typing import Any

from tqdm import tqdm

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.build import build_engine
from pagefold.engine.engine import Engine
from pagefold.engine.grammar import GrammarCompiler, Matcher, form_of
from pagefold.engine.outputs import RequestOutput

Prompt = str | Sequence[int] | dict[str, Any]


class LLM:
    """A model in memory, and an engine around it.

        llm = LLM("smollm2", kv_eviction="zipage", kv_budget=256)
        outputs = llm.generate(["Why is the sky blue?"], SamplingParams(max_tokens=200))

    model     built-in name ("smollm2"), Hugging Face directory or Hub id, or a .gguf file
    options   any leaf of `EngineConfig`, by its name; an unknown one is an error that lists the known
    """

    def __init__(self, model: str = "smollm2", **options: Any):
        self.config = EngineConfig.from_options(model=model, **options)
        self.engine: Engine = build_engine(self.config)
        self._ids = count()

    @property
    def tokenizer(self):
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; outputs come in the order of the prompts.

        prompts           text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}; one or a list
        sampling_params   one for all, or one per prompt
        Raises InputError for the first prompt that cannot be served; none is started then.
        """
        each: Any = [prompts]
        if isinstance(prompts, Iterable) and not isinstance(prompts, (str, dict)):
            each = list(prompts)
            if each and all(isinstance(p, Integral) for p in each):
                each = [each]
        return self._run([self._tokens(p) for p in each], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        template   passed on to the template (`tools`, `add_generation_prompt`, `enable_thinking`, ...)
        """
        if not messages:
            raise InputError("messages", "is empty: there must be at least one message")
        talks: Any = [messages] if isinstance(messages[0], dict) else messages
        if self.tokenizer is None:
            raise InputError("messages", "this model has no tokenizer; use generate with token ids")
        prompts: list[tuple[str | None, list[int]]] = []
        for talk in talks:
            prompts.append((None, self.tokenizer.apply_chat_template(talk, **template)))
        return self._run(prompts, sampling_params, use_tqdm)

    def submit(self, request: Request, prompt_text: str | None = None) -> None:
        """Queue a request for whoever steps `engine`, with the grammar that its `structured_outputs` ask for.

        Raises InputError, naming the field, if it can never be served.
        """
        self.engine.add(request, prompt_text, self._matcher(request.sampling))

    def _matcher(self, sampling: SamplingParams) -> Matcher | None:
        if sampling.structured_outputs is None:
            return None
        ((way, value),) = sampling.structured_outputs.items()
        field = f"structured_outputs.{way}"
        kind, text = form_of(field, way, value)
        try:
            return self._compiler.submit(kind, text).result()
        except InputError as error:
            raise InputError(field, str(error).removeprefix(f"{error.field}: ")) from None

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        engine = self.engine
        if engine.tokenizer is None or not engine.eos_token_ids:
            raise InputError("structured_outputs", "needs a tokenizer, and this model has none")
        try:
            return GrammarCompiler(engine.tokenizer, engine.vocab_size, sorted(engine.eos_token_ids))
        except ModuleNotFoundError as error:
            raise InputError("structured_outputs", f"{error}; pip install 'pagefold[server]'") from None

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text = None
        if isinstance(prompt, dict):
            if "prompt_token_ids" not in prompt and "prompt" not in prompt:
                raise InputError("prompt", f"got keys {sorted(prompt)}, need 'prompt' or 'prompt_token_ids'")
            text = prompt.get("prompt")
            prompt = prompt.get("prompt_token_ids", text)  # type: ignore[assignment]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("prompt", "is text, and this model has no tokenizer; pass token ids")
            return prompt, self.tokenizer.encode(prompt)
        ids: Any = prompt
        try:
            return text, [index(token) for token in ids]
        except TypeError:
            raise InputError("prompt", f"got {prompt!r}, must be text, token ids, or a dict with either") from None

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise InputError("sampling_params", f"got {len(each)} for {len(prompts)} prompts")
        if not all(isinstance(sampling, SamplingParams) for sampling in each):
            raise InputError("sampling_params", f"got {each!r}, must be SamplingParams, one or a list")
        ids = []
        try:
            for (text, tokens), sampling in zip(prompts, each, strict=True):
                request = Request(f"{next(self._ids)}", tuple(tokens), sampling)
                self.submit(request, text)
                ids.append(request.id)
            done = {output.request_id: output for output in self._steps(len(ids), use_tqdm)}
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return [done[request_id] for request_id in ids]

    def _steps(self, num_requests: int, use_tqdm: bool) -> Iterable[RequestOutput]:
        """Run the engine until it is empty; yields requests as they finish."""
        scheduler, tokens, start = self.engine.scheduler, 0, time.perf_counter()
        with tqdm(total=num_requests, desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self.engine.has_work:
                outputs = self.engine.step()
                tokens += len(outputs)
                for output in outputs:
                    if output.finished:
                        bar.update()
                        yield output
                if use_tqdm:
                    pool = self.engine.manager.pools[0]
                    bar.set_postfix_str(
                        f"{tokens / (time.perf_counter() - start):.0f} tok/s, "
                        f"pool {pool.num_held / (pool.num_pages - 1):.0%}, "
                        f"running {len(scheduler.running)}, waiting {len(scheduler.waiting)}",
                        refresh=False,
                    )
