"""Train the demo model: `python -m examples.model.train --out DIR [--device cuda] [--resume]`.

A curriculum of five lessons, each on training assignments made on the fly from the seed: two or three criteria in a
shortened prompt, the same among filler, the project's whole prompt with few criteria, the whole prompt with all and
with longer submissions, and that with names of any letters. The loss is on the answers only. It ends after `--steps` or
`--minutes`, whichever is first, and the learning rate falls to zero towards it. The checkpoint in DIR is replaced every
two minutes and at SIGTERM; `--resume` goes on from it. At the end DIR holds what `examples.model.export` reads:
weights.npz, tokenizer.json and the loss curves, of the runs before it too. Needs PyTorch, NumPy and tokenizers.
"""

import argparse
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from engines.chat import common_prefix
from examples.model.assignments import LabelledClass, make_class
from examples.model.network import Qwen3, Signs, initialise, mark_places
from examples.model.shape import TRAINED
from examples.model.tokens import END, framed, learn_bpe, training_texts
from examples.model.variety import vary
from examples.model.worlds import HELD_OUT, TRAINING, WIDE_TRAINING, World
from grading.rubric.rubric import Aspect

SEED = 20260
IGNORED = -100
CURVES = "training.json"


@dataclass(frozen=True, slots=True)
class Lesson:
    """One stage of the curriculum: up to step `until`."""

    until: int
    criteria: tuple[int, int]
    whole: bool  # the project's whole prompt, or only rubric, solution and submission without fence
    plain: bool  # without filler
    share: float = 1.0  # of the batches; the rest are as in the lesson before
    varied: bool = False  # as `variety` has it
    questions: bool = False  # one after each submission, instead of all criteria at once
    world: World = TRAINING


LESSONS = (
    Lesson(300, (2, 3), whole=False, plain=True),
    Lesson(600, (2, 4), whole=False, plain=False),
    Lesson(900, (2, 4), whole=True, plain=False, share=0.6),
    Lesson(1543, (3, 6), whole=True, plain=False, share=0.85, varied=True),
    Lesson(1_000_000, (3, 6), whole=True, plain=False, share=0.85, varied=True, world=WIDE_TRAINING),
)

# What a run that goes on from weights mostly sees: the form of a prompt is learnt from short ones, too.
SHORT = replace(LESSONS[-1], criteria=(2, 4), plain=True, varied=False)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Token ids and targets; padding has the target IGNORED."""

    shared: Tensor  # (classes, tokens)
    lengths: Tensor  # (classes,)
    own: Tensor  # (classes, each, tokens)
    targets: Tensor  # (classes, each, tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is made of; kept with the loss curve."""

    seed: int
    steps: int
    classes: int
    each: int
    rate: float
    pace: float
    start: str  # a folder with weights to go on from, by the last lesson and by questions; "": from none
    minutes: float
    device: str
    threads: int
    hold: bool  # the learning rate, to the end: another run goes on
    workers: int  # processes that make batches; 0: training makes them itself


class Lessons(Dataset[TrainingBatch]):
    """The batch of every step, of its lesson's world unless another is given.

    The same for the same seed and step, wherever training was resumed.
    """

    def __init__(self, tokenizer: Tokenizer, plan: Plan, world: World | None = None, first: int = 0) -> None:
        self._tokenizer, self._plan, self._world, self._first = tokenizer, plan, world, first

    def __len__(self) -> int:
        return max(0, self._plan.steps - self._first)

    def __getitem__(self, index: int) -> TrainingBatch:
        step = self._first + index
        draw = random.Random(f"{self._plan.seed} {step}")
        if self._plan.start:
            lesson = LESSONS[-1] if draw.random() < 0.4 else SHORT
            return self.lesson(draw, replace(lesson, questions=draw.random() < 0.7))
        at = next(i for i, lesson in enumerate(LESSONS) if step < lesson.until * self._plan.pace)
        lesson = LESSONS[at if draw.random() < LESSONS[at].share else at - 1]
        return self.lesson(draw, lesson)

    def lesson(self, draw: random.Random, lesson: Lesson) -> TrainingBatch:
        """One batch of this lesson."""
        make = self._questions if lesson.questions else self._class
        return self._collate([make(draw, lesson) for _ in range(self._plan.classes)])

    def _class(self, draw: random.Random, lesson: Lesson) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        made, role = self._made(draw, lesson, self._plan.each)
        shared_ids: list[int] = []
        rows = []
        for labelled in made.submissions:
            fence = _fence(draw)
            shared, own = made.prompt(role, labelled, fence)
            if not lesson.whole:
                shared = shared[shared.index("# Rubric") : shared.index("# Answer")]
                own = own[own.index("===") : own.rindex("===")].replace(f"{fence} ", "")
            parts = [self._ids(text) for text in framed(shared, own, made.answer(role, labelled))]
            shared_ids = parts[0]
            rows.append((parts[1], parts[2]))
        return shared_ids, rows

    def _questions(self, draw: random.Random, lesson: Lesson) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """One submission is what its questions share. That about passages is drawn half as often as any other."""
        made, role = self._made(draw, lesson, 1)
        asked = made.questions(role, made.submissions[0], _fence(draw))
        often = [*([2] * (len(asked) - 1)), 1]
        rows = [
            [self._ids(text) for text in framed("", prompt, answer)]
            for prompt, answer in draw.choices(asked, often, k=self._plan.each)
        ]
        whole = [begin + prompt for begin, prompt, _ in rows]
        shared = min([len(whole[0]) - 1, *(common_prefix(whole[0], ids) for ids in whole[1:])])
        return whole[0][:shared], [(ids[shared:], answer) for ids, (_, _, answer) in zip(whole, rows, strict=True)]

    def _made(self, draw: random.Random, lesson: Lesson, size: int) -> tuple[LabelledClass, Aspect]:
        made = make_class(self._world or lesson.world, draw.getrandbits(60), size, lesson.criteria, lesson.plain)
        return vary(made, draw) if lesson.varied else made, draw.choice(("code", "code", "feedback"))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _collate(self, made: list[tuple[list[int], list[tuple[list[int], list[int]]]]]) -> TrainingBatch:
        span = max(len(shared) for shared, _ in made)
        width = max(len(own) + len(answer) for _, rows in made for own, answer in rows) - 1
        lengths = torch.tensor([len(shared) for shared, _ in made])
        shared = torch.tensor([ids + [0] * (span - len(ids)) for ids, _ in made])
        own = torch.zeros(len(made), self._plan.each, width, dtype=torch.long)
        targets = torch.full_like(own, IGNORED)
        for row, (_, items) in enumerate(made):
            for column, (before, answer) in enumerate(items):
                ids = torch.tensor(before + answer)
                own[row, column, : len(ids) - 1] = ids[:-1]
                targets[row, column, len(before) - 1 : len(ids) - 1] = ids[len(before) :]
        return TrainingBatch(shared, lengths, own, targets)


def _fence(draw: random.Random) -> str:
    return f"{draw.getrandbits(48):012x}"


def signs(tokenizer: Tokenizer) -> Signs:
    """What `initialise` needs to know of the vocabulary. Raises ValueError if a sign is no token of its own."""
    ids = {token: tokenizer.token_to_id(token) for token in ("---", "===", "?", END, "=")}
    missing = [token for token, number in ids.items() if number is None]
    if missing:
        raise ValueError(f"the tokenizer has no token of its own for {' and '.join(missing)}; learn it from prompts")
    return Signs(*ids.values())


class Training:
    """A model, its optimiser and its place in the curriculum."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self.plan, self.out = plan, out
        out.mkdir(parents=True, exist_ok=True)
        path = out / "tokenizer.json"
        if plan.start:
            shutil.copy(Path(plan.start) / "tokenizer.json", path)
        elif not path.exists():
            learn_bpe(training_texts(plan.seed), TRAINED.vocabulary).save(str(path))
        self.tokenizer = Tokenizer.from_file(str(path))
        self.model = Qwen3(TRAINED)
        if plan.start:
            weights = load_file(Path(plan.start) / "model.safetensors")
            self.model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
            mark_places(self.model.embed_tokens.weight, signs(self.tokenizer))
        else:
            initialise(self.model, plan.seed, signs(self.tokenizer))
        self.model.to(plan.device)
        decayed = [weight for weight in self.model.parameters() if weight.ndim == 2]
        others = [weight for weight in self.model.parameters() if weight.ndim != 2]
        groups = [{"params": decayed, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98), eps=1e-9)
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self.stopped = False

    # --- one step ---

    def run(self) -> None:
        """Train to the end of the plan, or until `stopped`."""
        lessons = Lessons(self.tokenizer, self.plan, first=self.step)
        started = saved = time.monotonic()
        sums, count = torch.zeros(3), 0
        for batch in DataLoader(lessons, batch_size=None, num_workers=self.plan.workers):
            progress = max(self.step / self.plan.steps, (time.monotonic() - started) / (60 * self.plan.minutes or 1e-9))
            if self.stopped or progress >= 1:
                break
            self._set_rate(min(1.0, (self.step + 1) / 20, 1.0 if self.plan.hold else (1 - progress) / 0.3))
            sums, count = sums + self._learn(batch), count + 1
            self.step += 1
            if self.step % 20 == 0:
                self._note(sums / count, started)
                sums, count = torch.zeros(3), 0
            if time.monotonic() - saved > 120:
                self.save()
                saved = time.monotonic()
        self.save()
        self._write_weights()

    def _set_rate(self, share: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = self.plan.rate * share

    def _learn(self, batch: TrainingBatch) -> Tensor:
        logits, targets, asked = self._answers(batch)
        loss = functional.cross_entropy(logits, targets[asked])
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        return torch.tensor([loss.item(), *self._right(logits, targets, asked)])

    def _answers(self, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the answers' tokens, all targets, and which of them belong to answers."""
        device = self.plan.device
        mixed = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
        with mixed:
            hidden = self.model(batch.shared.to(device), batch.lengths.to(device), batch.own.to(device))
            targets = batch.targets.to(device).flatten(0, 1)
            asked = targets != IGNORED
            logits = self.model.logits(hidden[asked]).float()
        return logits, targets, asked

    @torch.no_grad()
    def held_out(self, batches: int = 4) -> float:
        """The share of held-out answers in which every token is the likeliest, given the right ones before it."""
        lessons, draw = Lessons(self.tokenizer, self.plan, HELD_OUT), random.Random(self.plan.seed)
        lesson = replace(LESSONS[-1], questions=bool(self.plan.start))
        shares = [self._right(*self._answers(lessons.lesson(draw, lesson)))[1] for _ in range(batches)]
        return sum(shares) / len(shares)

    @torch.no_grad()
    def _right(self, logits: Tensor, targets: Tensor, asked: Tensor) -> tuple[float, float]:
        """The share of right tokens, and of right answers whole."""
        right = torch.ones_like(targets, dtype=torch.bool)
        right[asked] = logits.argmax(-1) == targets[asked]
        return right[asked].float().mean().item(), right.all(-1).float().mean().item()

    def _note(self, means: Tensor, started: float) -> None:
        row = {
            "step": self.step,
            "loss": round(means[0].item(), 4),
            "tokens_right": round(means[1].item(), 4),
            "answers_right": round(means[2].item(), 4),
        }
        if self.step % 250 == 0:
            row["held_out_answers_right"] = round(self.held_out(), 4)
        self.curve.append(row)
        print(json.dumps({**row, "seconds": round(time.monotonic() - started)}), flush=True)

    # --- kept on disk ---

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(), "step": self.step}
        torch.save(state, self.out / "checkpoint.new")
        os.replace(self.out / "checkpoint.new", self.out / "checkpoint.pt")
        before = _runs(Path(self.plan.start).parent) if self.plan.start else []
        runs = [*before, {"plan": asdict(self.plan), "curve": self.curve}]
        lines = ",\n".join(map(json.dumps, runs))
        (self.out / CURVES).write_text(f"[\n{lines}\n]\n", encoding="utf-8")

    def _write_weights(self) -> None:
        """The weights under Hugging Face's names, rounded to float16."""
        named = {f"model.{name}": value.detach().cpu().numpy() for name, value in self.model.named_parameters()}
        np.savez(self.out / "weights.npz", **{name: value.astype(np.float16) for name, value in named.items()})

    def load(self) -> None:
        state = torch.load(self.out / "checkpoint.pt", map_location=self.plan.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        self.curve = _runs(self.out)[-1]["curve"]


def _runs(folder: Path) -> list[Any]:
    """Plan and loss curve of each run that made the weights of this folder, the first one first."""
    path = folder / CURVES
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def _options() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--out", {"type": Path, "required": True, "help": "folder of checkpoint, tokenizer and loss curve"}
    yield "--seed", {"type": int, "default": SEED, "help": "of data and first weights"}
    yield "--steps", {"type": int, "default": 12_000, "help": "in all"}
    yield "--classes", {"type": int, "default": 4, "help": "assignments in a step"}
    yield "--each", {"type": int, "default": 6, "help": "submissions of each"}
    yield "--rate", {"type": float, "default": 2e-3, "help": "learning rate"}
    yield "--pace", {"type": float, "default": 1.0, "help": "length of the lessons, in their own lengths"}
    yield "--device", {"default": "cuda" if torch.cuda.is_available() else "cpu", "help": "cpu or cuda"}
    yield "--threads", {"type": int, "default": 2, "help": "on the CPU"}
    yield "--workers", {"type": int, "default": 0, "help": "processes that make batches"}
    yield "--start", {"default": "", "help": "folder of weights to go on from, with questions"}
    yield "--hold", {"action": "store_true", "help": "the learning rate, for another run that goes on"}
    yield "--resume", {"action": "store_true", "help": "go on from the checkpoint"}
    yield "--minutes", {"type": float, "default": 1e9, "help": "at most so long"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    for name, settings in _options():
        parser.add_argument(name, **settings)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else every worker that is forked warns
    plan = Plan(**{field.name: getattr(given, field.name) for field in fields(Plan)})
    training = Training(plan, given.out)
    if given.resume:
        training.load()

    def stop(_signal: int, _frame: object) -> None:
        training.stopped = True

    signal.signal(signal.SIGTERM, stop)
    training.run()


if __name__ == "__main__":
    main()
