"""A conversation with a published chat model: its template turns messages into a text, the model writes on, the answer is a message.

    chat = Chat(from_pretrained("smollm2"))
    for piece in chat.say("What is the capital of France?"):
        print(piece, end="", flush=True)
"""
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from ..generation import Batch, Sampler
from ..models import Encoder
from ..serialization import one_line
from .config import PretrainedError

LIMITS = {"seconds": 5, "memory": 1 << 30, "characters": 1 << 22}       # of the processor's time, of all memory, of what is written
PATIENCE = 60                   # seconds of the clock, where the processor's cannot be limited, or is busy with others


def render(template, messages, **names):
    """The text that a template makes of messages [{"role": "user", "content": "…"}, …] and asks for an answer to.

    The template comes with the weights and is somebody's program: it runs in Jinja's sandbox, where it reads what it is given and reaches
    nothing else, and in a process of its own (`template.py`) under LIMITS. Raises PretrainedError. names: what templates use besides,
    such as bos_token.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise PretrainedError("chat templates need a package that is not installed: pip install jinja2")
    request = {"path": sys.path, "template": template, "names": {"messages": messages, "add_generation_prompt": True, **names}, **LIMITS}
    answer = _rendered(json.dumps(request))
    if "text" in answer:
        return answer["text"]
    if "refused" in answer:
        raise PretrainedError(f"the chat template refuses these messages: {one_line(answer['refused'])}")
    raise PretrainedError(f"the chat template of the model cannot be used: {one_line(answer['error'])}")


def _rendered(request):
    """The answer of `template.py`, which the system ends where it takes too much."""
    try:
        done = subprocess.run([sys.executable, "-I", "-S", str(Path(__file__).with_name("template.py"))], input=request, text=True,
                              encoding="ascii", capture_output=True, timeout=PATIENCE)
        return json.loads(done.stdout)
    except OSError as error:
        return {"error": f"no process can be started for it ({error.strerror})"}
    except (subprocess.TimeoutExpired, ValueError):
        return {"error": f"it takes more than {LIMITS['seconds']} s or {LIMITS['memory'] >> 20} MiB"}


class Chat:
    """messages [{"role": …, "content": …}], which `say` makes longer by a question and its answer.

    sampler: a `generation.Sampler`, by default greedy. ValueError where the model came without a tokenizer.
    """

    def __init__(self, known, system=None, sampler=None, max_new_tokens=512, seed=0):
        if isinstance(known.model, Encoder):
            raise PretrainedError("this model reads and does not write: it is an encoder; tinygrad-tf embed compares sentences with it")
        if known.tokenizer is None:
            raise PretrainedError("this model came without a tokenizer: it reads numbers, and no text")
        if known.chat_template is None:
            raise PretrainedError("this model has no chat template: it was not trained to answer; let it continue a text with "
                                  "generation.complete(model, [text], 100, tokenizer=tokenizer)")
        self.known, self.sampler, self.max_new_tokens, self.seed = known, sampler or Sampler(0), max_new_tokens, seed
        self.messages = []
        if system:
            self._check(system)
            self.messages.append({"role": "system", "content": system})
        self.speed = self.finish_reason = None

    def prompt_ids(self):
        """The ids of all messages, as the template writes them, special tokens among them."""
        tokenizer = self.known.tokenizer
        names = {f"{role}_token": special_name(tokenizer, getattr(tokenizer, f"{role}_id")) for role in ("bos", "eos", "pad", "unk")}
        return tokenizer.encode(render(self.known.chat_template, self.messages, **names), allowed_special="all")

    def say(self, text):
        """Yields the answer in pieces, as they become certain. Whoever stops reading, or interrupts, leaves what was written till then."""
        self._check(text)
        self.messages.append({"role": "user", "content": text})
        answer = []
        try:
            for piece in self._pieces():
                answer.append(piece)
                yield piece
        finally:
            self._remember("".join(answer))

    def _check(self, text):
        """A special token in a question would end it for the model, and begin what nobody said; half a character is no text."""
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise PretrainedError("the text is no valid UTF-8: check how it is encoded, and say it again")
        for name in self.known.tokenizer.special_tokens:
            if name in text:
                raise PretrainedError(f"the text holds {name!r}, which for this model is no text but a sign between messages: leave it out")

    def _pieces(self):
        ids, model = self.prompt_ids(), self.known.model
        room = model.max_seq_len - len(ids)
        if room < 1:
            self.messages.pop()
            raise PretrainedError(f"the conversation has become too long: {len(ids)} tokens, and the model reads {model.max_seq_len}; "
                                  f"begin a new one")
        batch = Batch(model, tokenizer=self.known.tokenizer, max_rows=1, prefill_chunk=256)
        row = batch.add(ids, min(self.max_new_tokens, room), sampler=self.sampler, seed=self.seed + len(self.messages),
                        eos_id=self.known.tokenizer.eos_id)
        for row in batch:
            yield row.piece
        self.speed, self.finish_reason = batch.speed, row.finish_reason

    def _remember(self, answer):
        if self.messages and self.messages[-1]["role"] == "user":
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()             # nothing was said: the question can be asked again


def special_name(tokenizer, token_id):
    return next((name for name, i in tokenizer.special_tokens.items() if i == token_id), "")
