"""Byte-level BPE with Qwen2's split, and the chat template: the demo model's tokenizer, and what it learns from."""

import random
from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.model.assignments import make_class
from examples.model.corpus import make_corpus
from examples.model.worlds import TRAINING
from grading.rubric.rubric import ASPECTS

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (PAD, START, END)
# Qwen2's split, by which llama.cpp knows the pre-tokenizer "qwen2".
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_FENCE = "0123456789ab"


def learn_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A tokenizer of so many tokens, the three special ones last. No normalizer: bytes in, bytes out.

    Raises RuntimeError if the texts hold too little to learn that many.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if tokenizer.get_vocab_size() != vocabulary:
        raise RuntimeError(f"the texts gave {tokenizer.get_vocab_size()} tokens, not {vocabulary}: add text")
    return tokenizer


def training_texts(seed: int, classes: int = 300) -> Iterator[str]:
    """Prompts and answers of training classes, and some of the corpus: what the trained model's tokenizer learns."""
    for number in range(classes):
        made = make_class(TRAINING, seed + number, size=2)
        for labelled in made.submissions:
            for role in ASPECTS:
                yield from made.prompt(role, labelled, _FENCE)
                yield made.answer(role, labelled)
    yield from random.Random(seed).sample(make_corpus(seed, 200), 200)


def framed(shared: str, own: str, answer: str) -> tuple[str, str, str]:
    """A prompt and its answer in the chat template: the three parts, each of which is tokenised by itself."""
    return f"{START}user\n{shared}", f"{own}{END}\n{START}assistant\n", f"{answer}{END}"
