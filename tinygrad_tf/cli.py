"""The command line: `tinygrad-tf train`, `generate`, `evaluate`; the same as `python -m tinygrad_tf …`.

What a user can get wrong ends in one sentence on standard error and exit status 2; Ctrl-C ends with 130.
"""
import argparse
import dataclasses
import math
import os
import signal
import sys
from pathlib import Path

from . import __version__
from .backend import tune_allocator
from .training.config import PRESETS, TrainConfig

RUNS = Path("runs")


class UserError(Exception):
    """Something to be told in one sentence, without a traceback."""


def main(argv=None):
    """Runs one command and returns its exit status."""
    arguments = build_parser().parse_args(argv)
    for out in (sys.stdout, sys.stderr):
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="replace")           # a terminal that lacks a character shows ? and does not fail
    try:
        return arguments.command(arguments) or 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:                             # `tinygrad-tf generate | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, ValueError, OSError, FloatingPointError, MemoryError) as error:
        print(f"tinygrad-tf: {sentence(error)}", file=sys.stderr)
        return 2


def sentence(error):
    if isinstance(error, MemoryError):
        return "out of memory; use a smaller --batch-size, --context or --dim"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split())


# --- arguments --------------------------------------------------------------------------------------------------------

def build_parser():
    parser = argparse.ArgumentParser("tinygrad-tf", description="Train a small Transformer on text, and let it write.",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"tinygrad_tf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_generate(commands)
    _add_evaluate(commands)
    return parser


def _add_train(commands):
    p = commands.add_parser("train", help="train MiniGPT on a text; writes checkpoint, metrics.csv, loss.png, sample.txt")
    p.add_argument("--text", nargs="+", metavar="TEXT", help="UTF-8 files, or the name of a corpus: python-docs (default), shakespeare")
    p.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/minigpt, or the next free number)")
    p.add_argument("--resume", nargs="?", const=True, metavar="DIR", help="continue an interrupted run (default: the newest)")
    p.add_argument("--preset", choices=sorted(PRESETS), default="tiny", help="sizes and schedule to start from (default: tiny)")
    for field in dataclasses.fields(TrainConfig):
        p.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), metavar=type(field.default).__name__.upper(),
                       help=f"instead of the preset's (tiny: {field.default})")
    p.set_defaults(command=train)


def _add_run(p):
    p.add_argument("--run", type=Path, metavar="DIR", help="the run's folder (default: the newest in runs/)")


def _add_generate(commands):
    p = commands.add_parser("generate", help="let a trained model continue a prompt")
    _add_run(p)
    p.add_argument("--prompt", default="\n", help="the text to continue (default: a line break)")
    p.add_argument("--max-new-tokens", type=int, default=400, metavar="N")
    p.add_argument("--temperature", type=float, default=0.8, help="0 is greedy; 1 is the model's own distribution (default: 0.8)")
    p.add_argument("--top-k", type=int, default=None, metavar="K", help="draw among the K likeliest only")
    p.add_argument("--seed", type=int, default=0)
    p.set_defaults(command=generate)


def _add_evaluate(commands):
    p = commands.add_parser("evaluate", help="validation loss and perplexity beside the n-gram baselines")
    _add_run(p)
    p.add_argument("--text", nargs="+", metavar="TEXT", help="files or a corpus (default: the text of the run); its last 10 %% count")
    p.set_defaults(command=evaluate)


# --- train ------------------------------------------------------------------------------------------------------------

def train(arguments):
    from .training.trainer import CHECKPOINT, Trainer
    tune_allocator()
    if arguments.resume:
        folder = newest_run() if arguments.resume is True else Path(arguments.resume)
        if changed := [f.name for f in dataclasses.fields(TrainConfig) if getattr(arguments, f.name) is not None]:
            raise UserError(f"--resume continues with the settings of the run; leave out --{changed[0].replace('_', '-')}")
        trainer = Trainer.resume(folder, arguments.text)
        print(f"Resuming {folder} at step {trainer.step} of {trainer.config.steps}.")
    else:
        trainer = Trainer(configuration(arguments), arguments.text or ["python-docs"], arguments.out or free_folder())
        if (trainer.folder / CHECKPOINT).exists():
            raise UserError(f"{trainer.folder} already holds a run: continue it with --resume {trainer.folder}, or name another --out")
        trainer.folder.mkdir(parents=True, exist_ok=True)
    describe(trainer)
    if not train_with_bar(trainer):
        print(f"Interrupted at step {trainer.step}; everything is saved. Continue with:  tinygrad-tf train --resume {trainer.folder}")
        return 130
    finish(trainer)


def configuration(arguments):
    """The preset with the flags that were given."""
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(TrainConfig)}
    return dataclasses.replace(PRESETS[arguments.preset], **{k: v for k, v in given.items() if v is not None})


def free_folder():
    """runs/minigpt, or runs/minigpt-2, -3, … if that is taken."""
    names = [RUNS / "minigpt"] + [RUNS / f"minigpt-{i}" for i in range(2, 10_000)]
    return next(folder for folder in names if not folder.exists())


def newest_run():
    found = sorted(RUNS.glob("*/checkpoint.safetensors"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UserError("there is no run in runs/ yet; train one with `tinygrad-tf train`, or name its folder")
    return found[-1].parent


def describe(trainer):
    c, parameters = trainer.config, sum(p.numel() for p in trainer.model.parameters())
    print(f"Text: {' '.join(map(str, trainer.sources))}: {len(trainer.train_ids):,} characters to train on, "
          f"{len(trainer.validation_ids):,} held out, V_vocab = {trainer.tokenizer.vocab_size}.")
    print(f"Model: {c.layers} layers, C = {c.dim}, H = {c.heads}, T = {c.context}: {parameters:,} parameters. "
          f"{c.steps} steps of {c.batch_size} × {c.context} tokens. Folder: {trainer.folder}", flush=True)


def train_with_bar(trainer):
    """Trains under a progress bar. Ctrl-C finishes the step, saves, and returns False; a second one stops at once."""
    from tqdm import tqdm
    stop = StopSignal()
    bar = tqdm(total=trainer.config.steps, initial=trainer.step, unit="step", disable=None, dynamic_ncols=True)

    def report(step, loss, lr, tokens_per_second, validation_loss):
        bar.update()
        bar.set_postfix(loss=f"{loss:.3f}", lr=f"{lr:.1e}", tok_s=f"{tokens_per_second:,.0f}", refresh=False)
        if validation_loss is not None:
            tqdm.write(f"step {step:5d}   training loss {loss:.3f}   validation loss {validation_loss:.4f}   "
                       f"{tokens_per_second:,.0f} tokens/s")
            sys.stdout.flush()
    with bar, stop:
        return trainer.run(should_stop=lambda: stop.requested, report=report)


class StopSignal:
    """Within its `with` block the first SIGINT or SIGTERM only sets `requested`; the next one acts as usual."""

    def __init__(self):
        self.requested, self.before = False, {}

    def __enter__(self):
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._request)
        except ValueError:                              # not in the main thread: signals are not ours
            pass
        return self

    def _request(self, number, frame):
        self.requested = True
        self._restore()

    def _restore(self):
        while self.before:
            signal.signal(*self.before.popitem())

    def __exit__(self, *error):
        self._restore()


def finish(trainer):
    """The results: losses beside the baselines, the curve, and a sample."""
    baselines = trainer.baselines()
    trainer.save()
    trainer.metrics.draw(baselines)
    loss = [row["validation_loss"] for row in trainer.metrics.rows if row["validation_loss"] is not None][-1]
    print_comparison(loss, baselines)
    sample = sample_text(trainer.model, trainer.tokenizer, "\n", 400, 0.8, None, trainer.config.seed)
    from .training.checkpoint import write_atomically
    write_atomically(trainer.folder / "sample.txt", sample)
    print(f"\nA sample (temperature 0.8):\n{sample}\n")
    print(f"Written to {trainer.folder}/: checkpoint.safetensors, metrics.csv, loss.png, sample.txt")


def print_comparison(loss, baselines):
    print(f"\n{'':24s}nats per character   perplexity")
    for n, nats in sorted(baselines.items()):
        print(f"  {n}-gram baseline       {nats:10.4f}         {math.exp(nats):8.3f}")
    print(f"  MiniGPT, validation   {loss:10.4f}         {math.exp(loss):8.3f}")
    beaten = [n for n, nats in baselines.items() if loss < nats]
    print(f"MiniGPT beats the {max(beaten)}-gram model." if beaten else "MiniGPT is not yet better than letter frequencies: train longer.")


def sample_text(model, tokenizer, prompt, max_new_tokens, temperature, top_k, seed):
    return prompt.lstrip("\n") + "".join(stream_text(model, tokenizer, prompt, max_new_tokens, temperature, top_k, seed))


def stream_text(model, tokenizer, prompt, max_new_tokens, temperature, top_k, seed):
    """Yields the continuation of a prompt as text, character by character."""
    from .creation import tensor
    from .generation import stream
    from .random import Generator
    ids = tensor(tokenizer.encode(prompt, errors="strict")[None])
    generator = Generator().manual_seed(seed)
    for next_id in stream(model, ids, max_new_tokens, temperature, top_k, generator):
        yield tokenizer.decode(next_id.array[0])


# --- generate and evaluate --------------------------------------------------------------------------------------------

def generate(arguments):
    from .training.trainer import load_model
    if not arguments.prompt:
        raise UserError("--prompt is empty; give at least one character")
    model, tokenizer, _ = load_model(arguments.run or newest_run())
    pieces = stream_text(model, tokenizer, arguments.prompt, arguments.max_new_tokens, arguments.temperature, arguments.top_k,
                         arguments.seed)
    first = next(pieces, "")                            # whatever is wrong is said before anything is printed
    print(arguments.prompt.lstrip("\n") + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)


def evaluate(arguments):
    from .data import baselines, load_text, require_length
    from .training import evaluation
    from .training.checkpoint import load_checkpoint
    from .training.trainer import CHECKPOINT, encode_split, load_model
    tune_allocator()
    folder = arguments.run or newest_run()
    model, tokenizer, config = load_model(folder)
    sources = arguments.text or load_checkpoint(folder / CHECKPOINT)[1]["sources"]
    text_tokenizer, train_ids, validation_ids = encode_split(load_text(sources), tokenizer)
    require_length(validation_ids, 1, "held-out text")
    loss = evaluation.evaluate(model, validation_ids, config.context)
    print(f"{folder} on {' '.join(map(str, sources))}: {len(validation_ids):,} held-out characters")
    print_comparison(loss, baselines(train_ids, validation_ids, text_tokenizer.vocab_size))


if __name__ == "__main__":
    sys.exit(main())
