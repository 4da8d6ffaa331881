"""`expertly lab trace record`: what a model routes while it answers prompts, as a trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import seed, temperature
from expertly.cli.inputs import load_model
from expertly.cli.output import in_brackets, message, origin, progress_bar, reserved_stdout, show
from expertly.core.errors import ConfigError, ExpertlyError, TraceError
from expertly.core.units import format_nbytes, format_seconds
from expertly.lab.prompts import PROMPTS_HELP, RAW_HELP, AskedPrompt, Prompt, asked, read_prompts
from expertly.options import MODEL_HELP, REQUIRED, RESEARCH, LoadOptions, argument, json_flag, option

if TYPE_CHECKING:
    from expertly.lab.recording import Recording


@dataclass
class _Clock:
    """A streamer for transformers' `generate` that notes when each token came; the first call brings the prompt."""

    num_requests: int = 0
    num_tokens: int = 0  # that were written
    num_steps: int = 0  # from one token to the next
    step_ns: int = 0
    _times_ns: list[int] = field(default_factory=list)

    def put(self, value: Any) -> None:
        self._times_ns.append(time.perf_counter_ns())

    def end(self) -> None:
        times, self._times_ns = self._times_ns[1:], []
        self.num_requests += 1
        self.num_tokens += len(times)
        if len(times) > 1:
            self.num_steps += len(times) - 1
            self.step_ns += times[-1] - times[0]

    @property
    def tpot_s(self) -> float | None:
        return self.step_ns / self.num_steps / 1e9 if self.num_steps else None


@dataclass(frozen=True, kw_only=True)
class TraceRecordOptions(LoadOptions):
    model: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    prompts: str = option(REQUIRED, PROMPTS_HELP + ', each a request, run alone; "category" is kept', metavar="FILE")
    raw: bool = option(False, RAW_HELP)
    out: Path = option(REQUIRED, "where the trace goes: a new or an empty folder", metavar="DIR", type=Path)
    max_new_tokens: int = option(100, "of a request", least=1)
    temperature: float = option(0.0, "0 is greedy", metavar="X", type=temperature)
    seed: int = option(0, "with a temperature", metavar="N", type=seed)
    requests: int | None = option(None, "only the first N prompts", least=1)
    full: bool = option(False, "add routing scores, lookahead, router inputs and embeddings")
    learned: str | Path | None = option(
        "off",
        "what a system has learned, as of `run`; off: a trace is of this run alone",
        metavar="FILE",
        panel=RESEARCH,
        was="maps",
    )
    json: bool = json_flag()


def run(args: TraceRecordOptions) -> int:
    prompts = read_prompts(args.prompts, args.requests)
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise TraceError(f"{args.out}: not empty; a trace is written to a new or an empty folder")
    with reserved_stdout() as stdout:
        from expertly import api

        model, tokenizer = load_model(args.model, args)
        try:
            requests = _tokenised(prompts, model, tokenizer, args.raw)
            result = _record(model, requests, args)
            result["skipped"] = len(prompts) - len(requests)
        finally:
            api.unload(model)
        show(result, args.json, lambda: _summary(result), stdout)
    return 0


def _tokenised(prompts: Sequence[Prompt], model: Any, tokenizer: Any, is_raw: bool) -> list[AskedPrompt]:
    """The prompts that the model can be given; each of the others is named in a message."""
    from expertly.model.generation import max_positions

    found, left_out = asked(prompts, tokenizer, is_raw=is_raw, most=max_positions(model))
    for why in left_out:
        message(f"expertly: skipped: {why}")
    if not found:
        raise ConfigError(f"prompts: none of the {len(prompts)} can be given to this model, see above")
    return found


def _record(model: Any, requests: Sequence[AskedPrompt], args: TraceRecordOptions) -> dict[str, Any]:
    import torch

    from expertly import api
    from expertly.lab.recording import record

    torch.manual_seed(args.seed)
    clock, name = _Clock(), args.model or "demo"
    recording: Recording | None = None
    try:
        with (
            progress_bar("requests") as progress,
            record(model, args.out, full=args.full, name=name, **origin()) as recording,
        ):
            for absent, reason in recording.absent.items():
                message(f"expertly: the trace will have no {absent}: {reason}")
            for request in requests:
                if progress is not None:
                    progress("recording", clock.num_requests, len(requests))
                prompt, num_tokens = request.prompt, len(request.tokens)
                recording.begin_request(prompt.category, prompt.text, num_tokens)
                _generate(model, request.tokens, args, clock)
    except (KeyboardInterrupt, ExpertlyError):
        if recording is not None:
            message(
                f"expertly: {args.out}: kept what was recorded, {clock.num_requests} of {len(requests)} requests and "
                f"{recording.num_iterations} iterations"
            )
        raise
    stats = api.stats(model).as_dict()
    return {
        "model": name,
        "out": str(args.out),
        "requests": clock.num_requests,
        "iterations": recording.num_iterations,
        "rows": recording.num_rows,
        "new_tokens": clock.num_tokens,
        "bytes": sum(path.stat().st_size for path in args.out.iterdir()),
        "tpot_s": clock.tpot_s,
        "full": args.full,
        "absent": recording.absent,
        **{key: stats[key] for key in ("system", "segments", "memory_bytes", "expert_bytes")},
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _generate(model: Any, tokens: Sequence[int], args: TraceRecordOptions, clock: _Clock) -> None:
    """Alone in its batch; no further than the model has positions."""
    from expertly.model.generation import generate, generation_config, max_positions

    most, limit = args.max_new_tokens, max_positions(model)
    if limit is not None and not model.config.is_encoder_decoder:
        most = min(most, limit - len(tokens) + 1)  # the last token is not fed
    generate(model, tokens, generation_config(model, most, args.temperature), streamer=clock)


def _summary(result: dict[str, Any]) -> str:
    return in_brackets(
        f"{result['requests']} requests" + (f" ({result['skipped']} skipped)" if result["skipped"] else ""),
        f"{result['iterations']} iterations",
        f"{result['rows']} rows",
        format_nbytes(result["bytes"]),
        f"TPOT {format_seconds(result['tpot_s'])}",
        result["out"],
    )
