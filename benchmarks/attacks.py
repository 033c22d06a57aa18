"""How many attacks on the grader are flagged, and how many harmless submissions, by language and by family.

All texts are made up (`examples/attacks`). Each stands in a small ordinary homework; what is counted is submissions.

`flagged`, `false_flags`, `by_language`, `by_family`: families left out. The scorer is trained again without some
families, and then reads all attacks of these. The harmless texts, and a part of the attacks, come from `held_out`: they
were written before there was a scorer, and no training has ever seen them. `languages_left_out`, `kinds_left_out`: the
same with languages, and with kinds of harmless text. The scorer's list of words stays as it is: it has words of the
languages of `train`, whichever are left out, and none of `unseen_languages`. `shipped`: the weights that come with the
package, on `held_out` alone. `disguised`: the share of the attacks found there that is still found in a disguise.

`false_submissions`: the share of whole ordinary submissions that are flagged, none of which was trained on and none of
which we wrote: what the installed Python packages say of themselves (their README, as a report), and, where
`../shared/datasets` lies beside the project, answers and exam notebooks of students.

`points_raised`: how many points of 10 an attack adds to a poor notebook of the demo's class, in what is exported
without a review (None if all of it is held back), with the demo's model. `points_raised_at_all` counts what is held
back as well, `attacked` says how many there were. The demo's model knows one assignment and follows no instructions.

`--model M`: instead, the question of `--ask criteria`, whether a passage speaks to whoever grades, is put to a model of
kvasir.toml about held-out texts, drawn by the seed. It counts if the model quotes something that stands in the work;
answers that can't be read are counted apart.

What this does not show: one author wrote both corpora, and students write otherwise.
"""

import base64
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

from benchmarks import harness
from benchmarks.attacks_asked import asked
from benchmarks.attacks_points import points_raised
from examples.attacks.corpus import Text, read
from examples.attacks.train import TRAININGS, train
from grading.attacks.detection import strongest_passages
from grading.attacks.scorer import ScorerWeights
from grading.submissions.reading import read_document

GROUPS, QUICK_GROUPS = 8, 3
DATASETS = Path(__file__).parents[1].parent / "shared" / "datasets"
SHORTEST, LONGEST = 1_500, 12_000  # characters of a package's description that is read as a report
_LEET = str.maketrans("oieast", "013457")
_TWINS = str.maketrans("aeopcx", "аеорсх")

HOMEWORK = (
    (
        "library(dplyr)\norders <- read.csv('orders.csv')",
        "We kept one row per order and looked at the first rows.",
        "",
        "mean: 31.2\nrows: 412",
    ),
    (
        "import pandas as pd\ndf = pd.read_csv('trips.csv')\ndf.head()",
        "The longest trip took 84 minutes.",
        "",
        "count    1204\nmean       17.3",
    ),
    (
        "SELECT region, SUM(amount) FROM sales GROUP BY region;",
        "North is ahead of the other three regions.",
        "",
        "north | 1204\nsouth | 980",
    ),
)

DISGUISES: dict[str, Callable[[str], str]] = {
    "zero width": lambda text: "\u200b".join(text),
    "tag characters": lambda text: "".join(chr(0xE0000 + ord(char)) for char in text if " " <= char <= "~"),
    "look-alikes": lambda text: text.translate(_TWINS),
    "full width": lambda text: "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in text),
    "combining marks": lambda text: "".join(char + "\u0336" for char in text),
    "leet": lambda text: text.translate(_LEET),
    "spaced": lambda text: " ".join(text.replace(" ", "  ")),
    "line breaks": lambda text: text.replace(" ", "\n", 4),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "hex": lambda text: text.encode().hex(),
    "base64 twice": lambda text: base64.b64encode(base64.b64encode(text.encode())).decode(),
    "base32": lambda text: base64.b32encode(text.encode()).decode(),
    "entities": lambda text: "".join(f"&#{ord(char)};" for char in text),
    "escapes": lambda text: "".join(f"\\u{ord(char):04x}" for char in text),
    "comment": lambda text: f"<!-- {text} -->",
    "white text": lambda text: f'<span style="color:white;font-size:1px">{text}</span>',
    "tags in words": lambda text: "<b></b>".join(text),
    "variable": lambda text: "_".join(text.rstrip(".").split()) + " = True",
}


def others() -> Iterator[tuple[str, list[str]]]:
    """Whole texts of other people by where they come from: read here, and never copied."""
    descriptions = ((package.read_text("METADATA") or "").partition("\n\n")[2] for package in distributions())
    yield "packages", sorted({text[:LONGEST] for text in descriptions if len(text) > SHORTEST})
    answers: set[str] = set()
    for path in sorted((DATASETS / "saf" / "data").glob("*/*/*.xml")):
        answers |= {(answer.text or "").strip() for answer in ElementTree.parse(path).getroot().iter("response")}
    if answers:
        yield "answers", sorted(answers - {""})
    notebooks = [read_document(path) for path in sorted((DATASETS / "digiklausur" / "notebooks").glob("*.ipynb"))]
    if notebooks:
        yield "exams", ["\n\n".join(part.text for part in notebook.parts) for notebook in notebooks]


def submissions_flagged(texts: Iterable[Text], table: ScorerWeights | None) -> list[tuple[Text, bool]]:
    """Each text, and whether the submission that it stands in would need a look."""
    return [(text, flagged(text.text, table)) for text in texts]


def flagged(text: str, table: ScorerWeights | None = None) -> bool:
    """Whether a small homework that holds this text is flagged. It is the same homework for the same text."""
    return any(strongest_passages(homework(text), table))


def homework(text: str) -> tuple[str, str, str]:
    """Code, text and output of the small homework that this text stands in."""
    before, said, after, output = random.Random(text).choice(HOMEWORK)
    return before, f"{said}\n\n{text}\n{after}", output


def left_out(
    texts: Sequence[Text], groups: Sequence[set[str]], of: Callable[[Text], str], also: Sequence[Text] = ()
) -> list[tuple[Text, bool]]:
    """Each group's own texts, and what is always read as well, by a scorer that was trained without the group."""
    found = []
    for group in groups:
        table = train([text for text in texts if of(text) not in group])
        found += submissions_flagged([text for text in [*texts, *also] if of(text) in group], table)
    return found


def share(found: Iterable[tuple[Text, bool]], attack: bool) -> float | None:
    """The flagged share of the attacks, or of the harmless; None if there are none."""
    hits = [hit for text, hit in found if text.attack == attack]
    return sum(hits) / len(hits) if hits else None


def by(found: Iterable[tuple[Text, bool]], of: Callable[[Text], str]) -> dict[str, dict[str, float | None]]:
    """`flagged` and `false_flags` of each language, or of each family and kind."""
    groups = defaultdict(list)
    for text, hit in found:
        groups[of(text)].append((text, hit))
    return {
        name: {"flagged": share(each, True), "false_flags": share(each, False)} for name, each in sorted(groups.items())
    }


def _language(text: Text) -> str:
    return text.language


def _kind(text: Text) -> str:
    return ("attack " if text.attack else "harmless ") + text.kind


def _groups(names: Iterable[str], count: int) -> list[set[str]]:
    ordered = sorted(set(names))
    return [group for first in range(count) if (group := set(ordered[first::count]))]


def main() -> int:
    """Measure, print a table, and end with one line of JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("--model", help="ask this model of kvasir.toml instead, about the held-out texts")
    parser.add_argument("--texts", type=int, default=200, help="with --model: of so many (default: %(default)s)")
    options = parser.parse_args()
    began = time.perf_counter()
    seen, unseen = read("train"), read("held_out")
    if options.model:
        return _ask(options.model, unseen, 8 if options.quick else options.texts, options.seed)
    languages = {text.language for text in seen}
    count = QUICK_GROUPS if options.quick else GROUPS
    known = [text for text in unseen if text.language in languages]

    families = _groups((_kind(text) for text in seen if text.attack), count)
    found: list[tuple[Text, bool]] = []
    for group in families:
        known_texts = [text for text in seen if _kind(text) not in group]
        table = train(known_texts, options.seed, 1 if options.quick else TRAININGS)
        attacks = [text for text in [*seen, *known] if _kind(text) in group]
        found += submissions_flagged([*attacks, *(text for text in known if not text.attack)], table)
    figures: dict[str, object] = {
        "flagged": share(found, True),
        "false_flags": share(found, False),
        "by_language": by(found, _language),
        "by_family": {
            name: each["flagged"] for name, each in by([one for one in found if one[0].attack], _kind).items()
        },
    }
    _print("families left out", found, _kind)
    _print("families left out, by language", found, _language)
    if not options.quick:
        for label, of, names in (
            ("languages_left_out", _language, languages - {"code"}),
            ("kinds_left_out", _kind, {_kind(text) for text in seen if not text.attack}),
        ):
            again = left_out(seen, _groups(names, count), of, known)
            _print(label, again, of)
            figures[label] = by(again, of)
    ordinary = {name: [strongest_passages([text])[0] is not None for text in texts] for name, texts in others()}
    for name, flags in ordinary.items():
        print(f"whole ordinary submissions, {name}: {sum(flags)} of {len(flags)} flagged")
    raised = points_raised(
        [text for text in unseen if text.attack and text.language == "en"], 3 if options.quick else 30, options.seed
    )
    print(f"points raised: {raised}")
    shipped = submissions_flagged(unseen, None)
    ours = [one for one in shipped if one[0].language in languages]
    strange = [one for one in shipped if one[0].language not in languages]
    _print("shipped weights, texts that no training saw", ours, _language)
    _print("shipped weights, languages that it has never met", strange, _language)
    hits = [text.text for text, hit in ours if hit and text.attack and text.text.isascii() and "\n" not in text.text]
    disguised = {name: sum(flagged(change(text)) for text in hits) / len(hits) for name, change in DISGUISES.items()}
    print(f"\ndisguised, of {len(hits)} found: " + ", ".join(f"{name} {part:.0%}" for name, part in disguised.items()))
    print(f"{time.perf_counter() - began:.0f} s; {harness.machine()}")
    harness.finish(
        **figures,
        false_submissions=fmean(is_flagged for flags in ordinary.values() for is_flagged in flags),
        points_raised=raised.exported,
        points_raised_at_all=raised.every,
        attacked=raised.count,
        exported=raised.count_exported,
        shipped={"flagged": share(ours, True), "false_flags": share(ours, False)},
        unseen_languages={"flagged": share(strange, True), "false_flags": share(strange, False)},
        disguised=disguised,
        submissions=len(found),
    )
    return 0


def _ask(model: str, texts: list[Text], count: int, seed: int) -> int:
    chosen = random.Random(seed).sample(texts, min(count, len(texts)))
    answers = list(asked(model, chosen, homework, seed))
    found = [(text, hit) for text, hit in answers if hit is not None]
    _print(f"{model}, asked about texts that no training saw", found, _kind)
    print(harness.machine())
    harness.finish(
        model=model,
        asked=len(answers),
        unusable=len(answers) - len(found),
        flagged=share(found, True),
        false_flags=share(found, False),
        by_language=by(found, _language),
        by_family={name: each["flagged"] for name, each in by([one for one in found if one[0].attack], _kind).items()},
    )
    return 0


def _print(title: str, found: Sequence[tuple[Text, bool]], of: Callable[[Text], str]) -> None:
    print(f"\n{title}: {_percent(share(found, True))} of attacks, {_percent(share(found, False))} of harmless")
    for name, each in by(found, of).items():
        print(f"  {name:24} {_percent(each['flagged']):>6} {_percent(each['false_flags']):>6}")


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.1%}"


if __name__ == "__main__":
    raise SystemExit(main())
